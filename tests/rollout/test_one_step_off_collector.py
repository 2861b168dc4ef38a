"""The pipelined collector around one whose rollouts take a second each, on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.collectors.base import CollectorState
from rollout.collectors.one_step_off import OneStepOffCollector
from rollout.collectors.output import RolloutOutput
from samples.errors import InputError
from tests.rollout.async_cases import TinySource, index_of
from tests.rollout.virtual_clock import run_virtually


class SlowRollouts:
    """Stands where the synchronous collector stands: two groups a rollout, one second each."""

    def __init__(self, source: TinySource) -> None:
        self.source = source
        self.version = 0
        self.began: list[int] = []
        self.fails_at: int | None = None

    async def collect(self, rollout_id: int) -> RolloutOutput:
        self.began.append(rollout_id)
        groups, version = self.source.next_groups(2), self.version
        await asyncio.sleep(1.0)
        if rollout_id == self.fails_at:
            raise InputError("the filter failed")
        for group in groups:
            for sample in group:
                sample.rollout_id, sample.weight_version, sample.response_length = rollout_id, version, 1
        return RolloutOutput(rollout_id, groups, {"perf/rollout_time": 1.0}, groups, ended=not groups)

    async def settle(self) -> None: ...

    def weights_updated(self, version: int) -> None:
        self.version = version

    async def state(self) -> CollectorState:
        return CollectorState(self.source.state_dict(), {"mode": "sync"})

    def restore(self, state: CollectorState) -> None:
        self.source.load_state_dict(state.source)

    async def close(self) -> None: ...


def make(prompts: int = 100, num_rollout: int = 4) -> tuple[OneStepOffCollector, SlowRollouts]:
    source = TinySource(prompts)
    inner = SlowRollouts(source)
    clock = asyncio.get_running_loop().time
    return OneStepOffCollector(inner, source, num_rollout=num_rollout, clock=clock), inner


async def train(collector: OneStepOffCollector, steps: range) -> list[RolloutOutput]:
    outputs = []
    for step in steps:
        outputs.append(await collector.collect(step))
        await asyncio.sleep(1.0)  # training takes as long as a rollout
        await collector.settle()
        collector.weights_updated(step + 1)
    return outputs


def test_the_next_rollout_runs_while_the_last_is_trained_on() -> None:
    async def run() -> None:
        collector, inner = make()
        outputs = await train(collector, range(4))
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)  # in turn it would be 8
        assert [index_of(group) for output in outputs for group in output.groups] == list(range(8))
        assert inner.began == [0, 1, 2, 3]  # and none beyond the last step
        ages = [output.metrics["rollout/async/staleness/max"] for output in outputs]
        assert ages == [0, 1, 1, 1]
        assert [output.metrics["perf/rollout_time"] for output in outputs] == pytest.approx([1.0, 0.0, 0.0, 0.0])
        assert outputs[2].metrics["rollout/async/engine_busy_ratio"] == pytest.approx(1.0)
        assert {sample.train_step for group in outputs[2].groups for sample in group} == {2}

    run_virtually(run())


def test_new_weights_wait_until_the_rollout_under_way_is_done() -> None:
    async def run() -> None:
        collector, _ = make()
        await collector.collect(0)
        await collector.settle()
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        await collector.close()

    run_virtually(run())


def test_a_resumed_run_trains_on_the_rollout_that_was_finished() -> None:
    async def run() -> None:
        collector, _ = make()
        await train(collector, range(2))
        state = await collector.state()
        assert [entry.index for entry in state.waiting] == [4, 5]
        assert [entry.version for entry in state.waiting] == [1, 1]
        whole = [output.groups for output in await train(collector, range(2, 4))]

        resumed, inner = make()
        resumed.restore(state)
        resumed.weights_updated(2)
        outputs = await train(resumed, range(2, 4))
        assert inner.began == [3]
        assert [output.groups for output in outputs] == whole
        assert outputs[0].metrics["rollout/async/staleness/max"] == 1

    run_virtually(run())


def test_the_error_of_the_rollout_under_way_surfaces_with_the_next_weights() -> None:
    async def run() -> None:
        collector, inner = make()
        inner.fails_at = 1
        await collector.collect(0)
        with pytest.raises(InputError, match="the filter failed"):
            await collector.settle()
        await collector.close()

    run_virtually(run())


def test_prompts_that_end_end_the_run() -> None:
    async def run() -> None:
        collector, _ = make(prompts=3)
        outputs: list[Any] = await train(collector, range(3))
        assert [len(output.groups) for output in outputs] == [2, 1, 0]
        assert [output.ended for output in outputs] == [False, False, True]

    run_virtually(run())


def test_closing_cancels_the_rollout_under_way() -> None:
    async def run() -> None:
        collector, _ = make()
        await collector.collect(0)
        before = asyncio.get_running_loop().time()
        await collector.close()
        assert asyncio.get_running_loop().time() == before

    run_virtually(run())
