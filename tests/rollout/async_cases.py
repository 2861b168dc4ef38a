"""A fully asynchronous rollout in which everything that can happen does, at random times, and whose books are checked.

Source, engine and reward are small and random; the collector is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from filters import DynamicFilterOutput
from observability import RolloutMetrics
from rollout.collectors.base import CollectorState
from rollout.collectors.fully_async import FullyAsyncCollector
from rollout.collectors.screening import Screen
from rollout.config import RolloutConfig
from samples.sample import Group, Sample, Status
from samples.source import SourceCounts

GROUP_SIZE = 2


class TinySource:
    """Prompts 0, 1, 2, ... up to ``size``; returned groups come first. As strict as the real source about returns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0
        self.line: list[Group] = []
        self.returns = 0

    counts = SourceCounts(0, 0, 0, 0)

    def next_groups(self, n: int) -> list[Group]:
        returned, self.line = self.line[:n], self.line[n:]
        fresh = range(self.next, min(self.size, self.next + n - len(returned)))
        self.next = max(self.next, fresh.stop)
        return returned + [fresh_group(index) for index in fresh]

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None:
        for group in groups:
            index = group[0].group_index
            assert index is not None
            assert index < self.next, "never drawn"
            assert index not in {waiting[0].group_index for waiting in self.line}, "returned twice"
        self.returns += len(groups)
        self.line = [fresh_group(index_of(group)) if reset else group for group in groups] + self.line

    def state_dict(self, in_flight: Iterable[Group] = ()) -> dict[str, Any]:
        in_line = [index_of(group) for group in self.line]
        return {"next": self.next, "line": [index_of(group) for group in in_flight] + in_line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        self.line = [fresh_group(index) for index in state["line"]]


def fresh_group(index: int) -> Group:
    return [
        Sample(
            prompt=str(index),
            tokens=[1],
            index=GROUP_SIZE * index + place,
            group_index=index,
            prompt_row=index,
            epoch=0,
        )
        for place in range(GROUP_SIZE)
    ]


def index_of(group: Group) -> int:
    index = group[0].group_index
    assert index is not None
    return index


@dataclass
class Chances:
    """How often what happens, and how long things take, in seconds."""

    answer: float = 1.0
    score: float = 0.1
    fail: float = 0.0
    abort: float = 0.0
    reject: float = 0.0
    allows_fallback: float = 0.0
    empty: float = 0.0
    ignores_cancel: float = 0.0
    train: float = 1.0


class Boom(Exception):
    """What a group that fails raises."""


class RandomRunner:
    """Answers and scores after random times; fails and aborts by chance. ``version`` is the engine's."""

    def __init__(self, chance: random.Random, chances: Chances) -> None:
        self._chance = chance
        self._chances = chances
        self.version = 0
        self.running = 0
        self.most = 0
        self._aborts: dict[int, asyncio.Event] = {}

    async def answer(self, group: Group, params: Any, *, rollout_id: int) -> None:
        index, chances = index_of(group), self._chances
        self.running += 1
        self.most = max(self.most, self.running)
        abort = self._aborts[index] = asyncio.Event()
        try:
            seconds = self._chance.expovariate(1 / chances.answer) if chances.answer else 0.0
            if self._happens(chances.abort):
                asyncio.get_running_loop().call_later(self._chance.random() * seconds, abort.set)
            versions = [self.version] * len(group)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abort.wait(), seconds)
            if self._happens(chances.fail):
                raise Boom(index)
            for sample, version in zip(group, versions, strict=True):
                first = sample.response_length == 0
                if sample.status in (Status.PENDING, Status.ABORTED):
                    done = not abort.is_set() or self._chance.random() < 0.5
                    sample.status = Status.COMPLETED if done else Status.ABORTED
                    if done or self._chance.random() < 0.7:
                        sample.tokens = [*sample.tokens, 2]
                        sample.response_length += 1
                        sample.weight_version = version if first else sample.weight_version
                sample.rollout_id = rollout_id
        except asyncio.CancelledError:
            if self._happens(chances.ignores_cancel):
                await asyncio.sleep(0.5)
                return
            raise
        finally:
            self.running -= 1

    async def finish(self, group: Group, *, rollout_id: int, group_index: int | None = None) -> float:
        assert all(sample.status is Status.COMPLETED for sample in group), "an aborted group is not scored"
        await asyncio.sleep(self._chance.expovariate(1 / self._chances.score) if self._chances.score else 0.0)
        if self._happens(self._chances.fail):
            raise Boom(index_of(group))
        for sample in group:
            sample.reward = 1.0
        if self._happens(self._chances.empty):
            group.clear()
        return 0.0

    def go_on(self) -> None: ...

    async def stop(self) -> None:
        for abort in self._aborts.values():
            abort.set()

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance


@dataclass
class Books:
    """What became of each prompt, over all processes of a run."""

    trained: Counter[int] = field(default_factory=Counter)
    ages: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Process:
    """One process of a run: a collector over a source, and a trainer that takes steps from it."""

    def __init__(
        self,
        chance: random.Random,
        chances: Chances,
        config: RolloutConfig,
        *,
        prompts: int,
        num_rollout: int,
        aborts: bool = False,
        state: tuple[CollectorState, int, int] | None = None,
    ) -> None:
        self.chance, self.chances, self.config, self.num_rollout = chance, chances, config, num_rollout
        self.source = TinySource(prompts)
        self.runner = RandomRunner(chance, chances)
        self.rejected: set[int] = set()
        self.collector = FullyAsyncCollector(
            config,
            runner=self.runner,
            source=self.source,
            screen=Screen(self._filter, None, "random"),
            metrics=RolloutMetrics(),
            num_rollout=num_rollout,
            aborts=aborts,
            clock=asyncio.get_running_loop().time,
        )
        self.step, self.version = 0, 0
        if state is not None:
            saved, self.step, self.version = state
            self.collector.restore(saved)

    def _filter(self, _args: Any, group: Group) -> DynamicFilterOutput:
        if self.chance.random() >= self.chances.reject:
            return DynamicFilterOutput(keep=True)
        fallback = self.chance.random() < self.chances.allows_fallback
        return DynamicFilterOutput(keep=False, reason="chance", keep_when_insufficient=fallback)

    async def update(self) -> None:
        await self.collector.settle()
        await asyncio.sleep(self.chance.random() * 0.2)
        self.runner.version = self.version
        self.collector.weights_updated(self.version)

    async def train(self, books: Books, *, after_step: Callable[[], Awaitable[None]] | None = None) -> None:
        """Steps until the source or the run ends, or an error does."""
        await self.update()
        while self.step < self.num_rollout:
            output = await self.collector.collect(self.step)
            self.check()
            if output.ended:
                break
            batch = self.config.rollout_batch_size
            assert len(output.groups) <= batch
            books.sizes.append(len(output.groups))
            for group in output.groups:
                books.trained[index_of(group)] += 1
                ages = [self.version - sample.weight_version for sample in group if sample.weight_version is not None]
                books.ages.append(max(ages))
                assert {sample.train_step for sample in group} == {self.step}
            await asyncio.sleep(self.chance.expovariate(1 / self.chances.train))
            self.step += 1
            if output.groups:
                self.version += 1
                await self.update()
            self.check()
            if after_step is not None:
                await after_step()

    def check(self) -> None:
        """Each drawn prompt is in exactly one place, and the books agree."""
        places, totals = self.collector.places, self.collector.places.totals
        assert totals.drawn == totals.trained + totals.dropped + totals.returned + totals.failed + places.outstanding
        assert totals.returned == totals.aborted + totals.retried + totals.stale + totals.cut_short
        here = [*places.in_flight, *(entry.index for entry in places.waiting), *map(index_of, self.source.line)]
        assert len(here) == len(set(here)), "a group is in two places"
        batch = self.config.rollout_batch_size
        assert places.outstanding <= batch * (self.config.max_weight_staleness + 1)
