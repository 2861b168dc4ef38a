"""Thousands of random schedules on a virtual clock: no group is ever lost, doubled or too old, and nothing hangs."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter

import pytest

from rollout.collectors.base import CollectorState
from rollout.config import RolloutConfig
from samples.errors import InputError, RunError
from tests.rollout.async_cases import Books, Boom, Chances, Process, index_of
from tests.rollout.virtual_clock import run_virtually

SCHEDULES = 2400
KINDS = 6

Checkpoint = tuple[CollectorState, int, int, Books]  # what is collected and trained so far: state, step, version, books


def _config(chance: random.Random, **settings: object) -> RolloutConfig:
    values = {
        "rollout_mode": "fully-async",
        "rollout_batch_size": chance.randint(1, 5),
        "n_samples_per_prompt": 2,
        "max_weight_staleness": chance.randint(0, 3),
        "max_groups_in_flight": chance.choice([None, None, 1, 3]),
        "max_group_retries": chance.randint(0, 3),
        "partial_rollout": chance.random() < 0.5,
        "on_sampling_exhausted": chance.choice(["shrink", "fallback"]),
        "max_sampling_rounds": chance.randint(1, 6),
    }
    return RolloutConfig.model_validate(values | settings)


def _chances(chance: random.Random) -> Chances:
    def some(most: float) -> float:
        return chance.choice([0.0, chance.random() * most])

    return Chances(
        answer=chance.choice([0.0, 0.1, 1.0, 5.0]),
        score=chance.choice([0.0, 0.1, 1.0]),
        fail=some(0.2),
        abort=some(0.4),
        reject=some(0.8),
        allows_fallback=some(1.0),
        empty=some(0.1),
        ignores_cancel=some(0.3),
        train=chance.choice([0.01, 1.0, 10.0]),
    )


async def _schedule(seed: int) -> Counter[str]:
    """One run of up to three processes: each ends by itself, or is shut down or killed at a random moment.

    One that is shut down is gone on from as it was; one that is killed, from its last checkpoint.
    """
    chance = random.Random(seed)
    config, chances = _config(chance), _chances(chance)
    prompts, num_rollout = chance.randint(1, 40), chance.randint(1, 8)
    aborts, saves = chance.random() < 0.3, chance.random()
    ends = Counter[str]()
    checkpoint: Checkpoint | None = None
    for life in range(3):
        before = copy.deepcopy(checkpoint)
        books = Books() if before is None else before[3]
        process = Process(
            chance, chances, config, prompts=prompts, num_rollout=num_rollout, aborts=aborts, state=_resumed(before)
        )
        saved = [checkpoint]

        async def save(
            process: Process = process, saved: list[Checkpoint | None] = saved, books: Books = books
        ) -> None:
            if chance.random() < saves:
                saved[0] = copy.deepcopy((await process.collector.state(), process.step, process.version, books))

        running = asyncio.ensure_future(process.train(books, after_step=save))
        done, _ = await asyncio.wait([running], timeout=None if life == 2 else chance.expovariate(1 / 20))
        process.check()
        if done:
            error = running.exception()
            ends["finished" if error is None else type(error).__name__] += 1
            if error is not None and not isinstance(error, (Boom, InputError, RunError)):
                raise error
        else:
            running.cancel()
            await asyncio.wait([running])
        end = await process.collector.state()
        await process.collector.close()
        process.check()
        assert not process.collector.places.in_flight
        _account(process, books)
        await asyncio.sleep(1.0)  # what ignored its cancellation ends, and changes nothing
        _account(process, books)
        if done:
            break
        if chance.random() < 0.5:
            ends["killed"] += 1
            checkpoint = saved[0]
        else:
            ends["shut down"] += 1
            steps = process.step + process.collector.places.training
            checkpoint = copy.deepcopy((end, steps, process.version, books))
    assert max(books.ages, default=0) <= config.max_weight_staleness
    return ends


def _resumed(checkpoint: Checkpoint | None) -> tuple[CollectorState, int, int] | None:
    return None if checkpoint is None else checkpoint[:3]


def _account(process: Process, books: Books) -> None:
    """Every prompt drawn so far is trained on once, waits, is back in line, or was reported: dropped or failed."""
    places = process.collector.places
    assert set(books.trained.values()) <= {1}, "a prompt was trained on twice"
    trained, waiting = set(books.trained), {entry.index for entry in places.waiting}
    in_line = set(map(index_of, process.source.line))
    assert not trained & waiting
    assert not trained & in_line
    assert not waiting & in_line
    reported = places.totals.dropped + places.totals.failed
    assert len(trained) + len(waiting) + len(in_line) + reported == process.source.next


@pytest.mark.parametrize("part", range(KINDS))
def test_no_schedule_loses_or_doubles_a_group(part: int) -> None:
    ends = Counter[str]()
    for seed in range(part, SCHEDULES, KINDS):
        try:
            ends += run_virtually(_schedule(seed))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    assert ends["finished"] > 20
    assert ends["killed"] > 20
    assert ends["shut down"] > 20
    assert ends["Boom"] > 5


@pytest.mark.nightly
def test_no_schedule_of_many_loses_or_doubles_a_group() -> None:
    for seed in range(10_000, 40_000):
        run_virtually(_schedule(seed))
