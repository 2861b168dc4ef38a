"""What the fully asynchronous collector does, one behaviour at a time, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from filters import DynamicFilterOutput
from observability import RolloutMetrics
from rollout.collectors.base import CollectorState
from rollout.collectors.fully_async import FullyAsyncCollector
from rollout.collectors.screening import Screen
from rollout.collectors.staleness import fits
from rollout.config import RolloutConfig
from samples.errors import InputError
from samples.sample import Group, Status
from tests.rollout.async_cases import Boom, TinySource, index_of
from tests.rollout.virtual_clock import run_virtually


class Scripted:
    """A group takes the seconds that ``seconds`` says; ``finish`` may be told to do something else."""

    def __init__(self, seconds: Callable[[int], float] = lambda index: 1.0) -> None:
        self.seconds = seconds
        self.version = 0
        self.started: list[int] = []
        self.aborting = asyncio.Event()
        self.on_finish: Callable[[int], Any] = lambda index: None

    async def stop(self) -> None:
        self.aborting.set()

    def go_on(self) -> None:
        self.aborting.clear()

    async def answer(self, group: Group, params: Any, *, rollout_id: int) -> None:
        self.started.append(index_of(group))
        version = self.version
        try:
            await asyncio.wait_for(self.aborting.wait(), self.seconds(index_of(group)))
            status = Status.ABORTED
        except TimeoutError:
            status = Status.COMPLETED
        for sample in group:
            if sample.status is not Status.COMPLETED:
                sample.status = status
                sample.weight_version = version if sample.weight_version is None else sample.weight_version
                sample.response_length += 1
                sample.tokens = [*sample.tokens, version]

    async def finish(self, group: Group, *, rollout_id: int, group_index: int | None = None) -> float:
        result = self.on_finish(index_of(group))
        if asyncio.iscoroutine(result):
            await result
        for sample in group:
            sample.reward = 1.0
        return 0.0


def make(
    runner: Scripted,
    *,
    prompts: int = 1000,
    num_rollout: int = 100,
    keeps: Any = None,
    aborts: bool = False,
    **settings: Any,
) -> FullyAsyncCollector:
    values = {"rollout_mode": "fully-async", "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    return FullyAsyncCollector(
        RolloutConfig.model_validate(values | settings),
        runner=runner,
        source=TinySource(prompts),
        screen=Screen(keeps, None, "my.filter"),
        metrics=RolloutMetrics(),
        num_rollout=num_rollout,
        aborts=aborts,
        clock=asyncio.get_running_loop().time,
    )


def indices(output: Any) -> list[int]:
    return [index_of(group) for group in output.groups]


async def take_steps(collector: FullyAsyncCollector, count: int) -> list[int]:
    return [index for step in range(count) for index in indices(await collector.collect(step))]


async def hand_over(collector: FullyAsyncCollector, runner: Scripted, version: int) -> None:
    await collector.settle()
    runner.version = version
    collector.weights_updated(version)


def test_a_step_takes_exactly_its_batch_and_the_surplus_waits_for_the_next() -> None:
    async def run() -> None:
        runner = Scripted()
        collector = make(runner)
        first = await collector.collect(0)  # all eight that may be in flight finish at once
        assert indices(first) == [0, 1, 2, 3]
        assert first.metrics["rollout/async/queue_depth"] == 4
        assert indices(await collector.collect(1)) == [4, 5, 6, 7]
        await collector.close()

    run_virtually(run())


def test_generation_goes_on_while_the_trainer_is_busy() -> None:
    async def run() -> None:
        runner = Scripted()
        collector = make(runner, max_groups_in_flight=2)
        await collector.collect(0)
        await asyncio.sleep(100.0)  # training
        assert len(collector.places.waiting) == 4  # one version ahead, and no further
        assert not collector.places.in_flight
        started = asyncio.get_running_loop().time()
        output = await collector.collect(1)
        assert asyncio.get_running_loop().time() == started
        assert output.metrics["perf/rollout_time"] == 0.0
        await collector.close()

    run_virtually(run())


def test_a_place_is_taken_again_the_moment_it_is_free() -> None:
    """No timer polls: with 1000 groups of random lengths, a slot is never idle while the gate is open."""

    async def run() -> None:
        chance = random.Random(0)
        runner = Scripted(lambda index: chance.lognormvariate(0, 1))
        collector = make(runner, max_groups_in_flight=8, max_weight_staleness=99, num_rollout=350)
        for step in range(240):
            output = await collector.collect(step)
            assert output.metrics["rollout/async/engine_busy_ratio"] == pytest.approx(1.0)
            assert output.metrics["rollout/async/in_flight"] == pytest.approx(8.0)
            collector.weights_updated(step + 1)
        await collector.close()

    run_virtually(run())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_group_is_older_than_the_bound_however_slow_it_is(bound: int) -> None:
    async def run() -> None:
        runner = Scripted(lambda index: 50.0 if index % 7 == 0 else 0.01)
        collector = make(runner, max_weight_staleness=bound, num_rollout=40)
        ages = []
        for step in range(40):
            output = await collector.collect(step)
            ages += [step - sample.weight_version for group in output.groups for sample in group]
            await asyncio.sleep(0.5)
            await hand_over(collector, runner, step + 1)
        assert max(ages) == bound
        assert collector.places.totals.stale == 0  # nothing that was paid for was given up
        await collector.close()

    run_virtually(run())


def test_what_fits_is_what_some_order_of_steps_can_use_in_time() -> None:
    assert fits([3, 3, 4], next_version=4, batch=2, bound=1)
    assert not fits([3, 3, 3], next_version=4, batch=2, bound=1)  # the third comes in the step after, at version 5
    assert fits([], next_version=9, batch=1, bound=0)


def test_an_error_is_tried_again_so_often_and_then_surfaces_as_it_is() -> None:
    async def run() -> None:
        runner = Scripted()

        def fail(index: int) -> None:
            if index == 2:
                raise Boom("out of order")

        runner.on_finish = fail
        collector = make(runner, max_group_retries=3)
        with pytest.raises(Boom, match="out of order"):
            await take_steps(collector, 10)
        assert runner.started.count(2) == 4
        assert collector.places.totals.retried == 3
        assert collector.places.totals.failed == 1
        await collector.close()

    run_virtually(run())


def test_a_group_that_succeeds_when_tried_again_is_trained_on_like_any_other() -> None:
    async def run() -> None:
        runner, failed = Scripted(), []

        def fail_once(index: int) -> None:
            if index == 2 and not failed:
                failed.append(index)
                raise Boom

        runner.on_finish = fail_once
        collector = make(runner, num_rollout=3)
        assert sorted(await take_steps(collector, 3)) == list(range(12))
        await collector.close()

    run_virtually(run())


@pytest.mark.parametrize("partial", [False, True])
def test_groups_aborted_for_new_weights_come_back_once_and_begin_again_or_go_on(partial: bool) -> None:
    async def run() -> None:
        runner = Scripted(lambda index: 1.0 if index < 4 else 5.0)
        collector = make(runner, aborts=True, partial_rollout=partial)
        await collector.collect(0)
        await asyncio.sleep(0.5)
        await collector.settle()
        await asyncio.sleep(0.01)
        assert not collector.places.in_flight  # nothing is dispatched before the new weights are there
        assert collector.places.totals.aborted == 4
        runner.version = 1
        collector.weights_updated(1)
        output = await collector.collect(1)
        assert indices(output) == [4, 5, 6, 7]
        for group in output.groups:
            for sample in group:
                assert sample.tokens == ([1, 0, 1] if partial else [1, 1])
                assert sample.weight_version == (0 if partial else 1)
        assert output.metrics["rollout/async/groups_aborted"] == 4
        assert output.metrics["rollout/async/staleness/max"] == (1 if partial else 0)
        await collector.close()

    run_virtually(run())


def test_responses_under_way_keep_the_version_of_their_first_token() -> None:
    async def run() -> None:
        runner = Scripted(lambda index: 1.0 if index < 4 else 5.0)
        collector = make(runner)
        await collector.collect(0)
        await hand_over(collector, runner, 1)
        output = await collector.collect(1)
        assert output.metrics["rollout/async/staleness/mean"] == 1.0
        await collector.close()

    run_virtually(run())


def test_prompts_that_end_end_the_run_with_every_accepted_group_used() -> None:
    async def run() -> None:
        collector = make(Scripted(), prompts=10)
        outputs = [await collector.collect(step) for step in range(4)]
        assert [indices(output) for output in outputs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
        assert [output.ended for output in outputs] == [False, False, False, True]
        await collector.close()

    run_virtually(run())


def test_nothing_is_generated_beyond_the_last_step() -> None:
    async def run() -> None:
        runner = Scripted()
        collector = make(runner, num_rollout=2, max_weight_staleness=5)
        await collector.collect(0)
        await collector.collect(1)
        assert sorted(runner.started) == list(range(8))
        assert collector.places.outstanding == 0
        await collector.close()

    run_virtually(run())


def test_rejected_groups_are_replaced_and_counted() -> None:
    async def run() -> None:
        def keeps(_args: Any, group: Group) -> DynamicFilterOutput:
            return DynamicFilterOutput(keep=index_of(group) % 2 == 0, reason="odd")

        collector = make(Scripted(), keeps=keeps)
        output = await collector.collect(0)
        assert indices(output) == [0, 2, 4, 6]
        assert output.metrics["rollout/dynamic_filter/drop/odd"] == 4
        await collector.close()

    run_virtually(run())


def test_the_fallback_keeps_rejected_groups_once_dropping_them_would_cost_another_round() -> None:
    """Eight are in flight for a step of four: the first four are dropped, the others kept. Nothing more is drawn."""

    async def run() -> None:
        def rejects(_args: Any, group: Group) -> DynamicFilterOutput:
            return DynamicFilterOutput(keep=False, reason="no", keep_when_insufficient=True)

        runner = Scripted(lambda index: 1.0 + index)
        collector = make(runner, keeps=rejects)
        output = await collector.collect(0)
        assert indices(output) == [4, 5, 6, 7]
        assert output.metrics["rollout/dynamic_filter/groups_by_fallback"] == 4
        assert output.metrics["rollout/dynamic_filter/rounds"] == 2  # eight groups: what is in flight at once
        assert all(sample.metadata["kept_by_fallback"] for group in output.groups for sample in group)
        await collector.close()

    run_virtually(run())


def test_a_strict_filter_that_rejects_everything_runs_into_the_bound() -> None:
    def rejects(_args: Any, group: Group) -> DynamicFilterOutput:
        return DynamicFilterOutput(keep=False, reason="zero_std")

    async def run(policy: str) -> Any:
        collector = make(Scripted(), keeps=rejects, max_sampling_rounds=3, on_sampling_exhausted=policy)
        try:
            return await collector.collect(0)
        finally:
            await collector.close()

    message = r"--max-sampling-rounds 3 .* my.filter: \d+ groups drawn, 0 kept, \d+ dropped \(\d+ zero_std\)"
    with pytest.raises(InputError, match=message):
        run_virtually(run("raise"))
    shrunk = run_virtually(run("shrink"))
    assert indices(shrunk) == []
    assert not shrunk.ended
    fallen_back = run_virtually(run("fallback"))
    assert indices(fallen_back) == [0, 1, 2, 3]
    assert fallen_back.metrics["rollout/dynamic_filter/groups_sampled"] <= 3 * 4 + 4  # and what was in flight then


def test_a_filter_that_fails_is_named_with_its_group() -> None:
    async def run() -> None:
        def breaks(_args: Any, group: Group) -> bool:
            return group[0].metadata["missing"]

        collector = make(Scripted(), keeps=breaks)
        with pytest.raises(InputError, match=r"--dynamic-sampling-filter-path my.filter failed on group 0: KeyError"):
            await collector.collect(0)
        await collector.close()

    run_virtually(run())


def test_closing_takes_a_bounded_time_though_a_reward_never_ends() -> None:
    async def run() -> None:
        runner = Scripted()

        async def stubborn() -> None:
            for _ in range(30):
                try:
                    await asyncio.sleep(1.0)
                except asyncio.CancelledError:
                    continue

        runner.on_finish = lambda index: stubborn()
        collector = make(runner)
        collecting = asyncio.ensure_future(collector.collect(0))
        await asyncio.sleep(2.0)
        started = asyncio.get_running_loop().time()
        await collector.close()
        assert asyncio.get_running_loop().time() - started <= 5.0
        with pytest.raises(RuntimeError, match="closed while step 0"):
            await collecting
        assert len(collector._source.line) == 8  # all of it is with the source again
        await asyncio.sleep(60.0)
        assert len(collector._source.line) == 8

    run_virtually(run())


def test_a_state_holds_what_waits_and_gives_the_rest_to_the_source() -> None:
    async def run() -> None:
        runner = Scripted(lambda index: 1.0 if index < 6 else 100.0)
        collector = make(runner, rollout_batch_size=4)
        await collector.collect(0)
        state = await collector.state()
        assert [(entry.index, entry.version) for entry in state.waiting] == [(4, 0), (5, 0)]
        assert state.source["line"] == [6, 7]
        await collector.close()

        resumed_runner = Scripted()
        resumed = make(resumed_runner)
        resumed.restore(state)
        resumed_runner.version = 1
        resumed.weights_updated(1)
        assert indices(await resumed.collect(1)) == [4, 5, 6, 7]
        assert resumed.places.totals.cut_short == 2
        await resumed.close()

    run_virtually(run())


def test_a_run_resumed_with_a_smaller_bound_draws_what_is_too_old_again() -> None:
    async def run() -> None:
        collector = make(Scripted(), max_weight_staleness=2)
        await collector.collect(0)
        state = await collector.state()
        await collector.close()
        runner = Scripted()
        resumed = make(runner, max_weight_staleness=0)
        resumed.restore(state)
        runner.version = 1
        resumed.weights_updated(1)
        assert resumed.places.totals.stale == len(state.waiting) == 8
        output = await resumed.collect(1)
        assert output.metrics["rollout/async/staleness/max"] == 0
        assert indices(output) == [4, 5, 6, 7]
        await resumed.close()

    run_virtually(run())


def test_the_state_of_another_mode_gives_all_prompts_back() -> None:
    async def run() -> None:
        collector = make(Scripted())
        await collector.collect(0)
        state = await collector.state()
        await collector.close()
        other = make(Scripted())
        other.restore(CollectorState(state.source, {"mode": "one-step-off"}, state.waiting))
        assert [index_of(group) for group in other._source.line] == [4, 5, 6, 7]
        await other.close()

    run_virtually(run())


def test_a_source_that_fails_is_heard_by_who_collects() -> None:
    async def run() -> None:
        collector = make(Scripted())

        def broken(n: int) -> list[Group]:
            raise InputError("prompts.jsonl line 7: no field 'prompt'")

        collector._source.next_groups = broken
        collector.weights_updated(0)
        with pytest.raises(InputError, match="line 7"):
            await collector.collect(0)
        await collector.close()

    run_virtually(run())
