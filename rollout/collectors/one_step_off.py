"""The pipelined collector: the next rollout runs while the last one is trained on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from observability.rollout_metrics import leaves_of
from rollout.collectors.base import Collector, CollectorState, WaitingGroup, restore_from_another_mode
from rollout.collectors.busy import BusyMeter
from rollout.collectors.flight import oldest_version, staleness_metrics
from rollout.collectors.output import RolloutOutput
from samples.sample import Group

logger = logging.getLogger(__name__)

MODE = "one-step-off"
CLOSE_SECONDS = 5.0  # how long close() waits for a cancelled rollout before it leaves its task behind


class OneStepOffCollector:
    """Runs ``inner``, which collects one rollout at a time, a step ahead.

    Rollout i + 1 begins as soon as rollout i is handed over, under the weights of that moment, and is finished before
    the engine gets the next ones: no response is of two versions, every step but the first trains on groups that are
    one version old, and what a run computes does not depend on timing.
    """

    def __init__(
        self, inner: Collector, source: Any, *, num_rollout: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner = inner
        self._source = source
        self._num_rollout = num_rollout
        self._clock = clock
        self._version = 0
        self._ahead: asyncio.Task[RolloutOutput] | None = None
        self._restored: RolloutOutput | None = None
        self._busy = BusyMeter(clock)

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """The groups of step ``rollout_id``, which may be there already. Raises what ended its rollout."""
        started = self._clock()
        output = self._restored
        if output is None:
            if self._ahead is None:
                self._begin(rollout_id)
            assert self._ahead is not None
            output = await self._ahead
        self._restored = self._ahead = None
        busy, _ = self._busy.read()
        waited = self._clock() - started
        if rollout_id + 1 < self._num_rollout and not output.ended:
            self._begin(rollout_id + 1)
        for sample in leaves_of(output.groups):
            sample.train_step = rollout_id
        metrics = output.metrics | staleness_metrics(output.groups, self._version)
        metrics["rollout/async/engine_busy_ratio"] = busy
        metrics["rollout/async/rollout_time"] = metrics.get("perf/rollout_time", 0.0)
        metrics["perf/rollout_time"] = waited
        return replace(output, metrics=metrics)

    async def settle(self) -> None:
        """Wait for the rollout under way. Raises what ended it."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])
            self._ahead.result()
        await self._inner.settle()

    def weights_updated(self, version: int) -> None:
        self._version = version
        self._inner.weights_updated(version)

    async def state(self) -> CollectorState:
        """With the next rollout, which is waited for: its groups are finished and not trained on."""
        await self.settle()
        inner = await self._inner.state()
        output = self._restored if self._ahead is None else self._ahead.result()
        facts: dict[str, Any] = {"mode": MODE, "inner": inner.facts, "rollout_id": None}
        if output is None:
            return CollectorState(inner.source, facts, inner.waiting)
        facts |= {"rollout_id": output.rollout_id, "metrics": output.metrics, "ended": output.ended}
        facts["groups"] = len(output.groups)
        waiting = [_waiting(group, self._version) for group in output.groups]
        return CollectorState(inner.source, facts, waiting + inner.waiting)

    def restore(self, state: CollectorState) -> None:
        facts = state.facts
        if facts.get("mode") != MODE:
            restore_from_another_mode(state, self._source)
            return
        count = facts["groups"] if facts["rollout_id"] is not None else 0
        groups = [entry.group for entry in state.waiting[:count]]
        self._inner.restore(CollectorState(state.source, facts["inner"], state.waiting[count:]))
        if facts["rollout_id"] is not None:
            self._restored = RolloutOutput(facts["rollout_id"], groups, facts["metrics"], groups, facts["ended"])

    async def close(self) -> None:
        ahead = self._ahead
        if ahead is not None:
            ahead.cancel()
            _, left = await asyncio.wait([ahead], timeout=CLOSE_SECONDS)
            if left:
                logger.warning("the rollout under way did not end when cancelled; its task is left behind")
            elif not ahead.cancelled() and ahead.exception() is not None:
                logger.warning("the rollout under way had failed: %r", ahead.exception())
        await self._inner.close()

    def _begin(self, rollout_id: int) -> None:
        self._busy.set(1)
        self._ahead = asyncio.create_task(self._inner.collect(rollout_id), name=f"rollout {rollout_id}")
        self._ahead.add_done_callback(lambda _: self._busy.set(0))


def _waiting(group: Group, version: int) -> WaitingGroup:
    return WaitingGroup(group, oldest_version(group, version), next(leaves_of(group)))
