"""The fully asynchronous collector: generation goes on across training steps, and a step takes what is ready."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from filters import should_drop_dynamic_filter_output
from filters.output import UNUSABLE
from observability import RolloutMetrics
from observability.rollout_metrics import leaves_of
from rollout.collectors.base import CollectorState, GroupSource, restore_from_another_mode
from rollout.collectors.busy import BusyMeter
from rollout.collectors.flight import Flight, staleness_metrics
from rollout.collectors.output import RolloutOutput
from rollout.collectors.places import Places
from rollout.collectors.screening import Screen, mark_fallback
from rollout.collectors.tally import described
from rollout.config import RolloutConfig
from rollout.engines.protocol import SamplingParams
from rollout.generation import sampling_params
from samples.errors import InputError, RunError
from samples.sample import Group

logger = logging.getLogger(__name__)

MODE = "fully-async"
MOST_ABORTS = 20  # of one group, when nothing was told to stop
CLOSE_SECONDS = 5.0  # how long close() waits for cancelled groups before it leaves their tasks behind


class Runner(Protocol):
    """What takes a group through engine, hooks and reward; ``rollout.group.GroupRunner`` is one."""

    async def answer(self, group: Group, params: SamplingParams, *, rollout_id: int) -> None: ...

    async def finish(self, group: Group, *, rollout_id: int, group_index: int | None = None) -> float: ...

    async def stop(self) -> None:
        """Have every answer under way, and until ``go_on`` every other, end ABORTED."""
        ...

    def go_on(self) -> None: ...


@dataclass
class _Tally:
    """The groups that finished since the last step was taken, and what the filter said."""

    sampled: list[Group] = field(default_factory=list)
    usable: list[tuple[int, Group]] = field(default_factory=list)  # (index, group): dropped, but fit for a fallback
    rejected: int = 0
    fallback: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    reward_seconds: float = 0.0

    def describe(self) -> str:
        judged, reasons = len(self.sampled), described(self.reasons)
        return f"{judged} groups drawn, {judged - self.rejected} kept, {self.rejected} dropped ({reasons})"


class FullyAsyncCollector:
    """Keeps groups in flight; finished ones wait in a list without an end, and a gate bounds both together.

    A step takes the oldest ``--rollout-batch-size`` finished groups, by weight version and then index; the others
    wait for the next. No group is ever too old: the gate lets through only what can still be trained on within
    ``--max-weight-staleness`` versions, and a step is not taken before all that would be too old afterwards is in it.

    Everything runs on one event loop. With ``aborts``, responses under way are aborted before the engine gets new
    weights; else they go on under them. ``counters`` gives metrics of other parts, by their names under ``rollout/``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        runner: Runner,
        source: GroupSource,
        screen: Screen,
        metrics: RolloutMetrics,
        num_rollout: int,
        aborts: bool = False,
        counters: Callable[[], dict[str, int]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._batch = config.rollout_batch_size
        self._runner = runner
        self._source = source
        self._screen = screen
        self._rollout_metrics = metrics
        self._num_rollout = num_rollout
        self._aborts = aborts
        self._counters = counters
        self._clock = clock
        self._params = sampling_params(config)
        self.places = Places(source, batch=self._batch, bound=config.max_weight_staleness)
        self._step = 0  # that is collected, or will be next
        self._knows_step = True  # else nothing is dispatched yet
        self._held = False  # the engine is about to get new weights
        self._closed = False
        self._failure: BaseException | None = None
        self._tally = _Tally()
        self._changed = asyncio.Event()
        self._busy = BusyMeter(clock)
        self._said_fallback = False

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """The groups of step ``rollout_id``: a batch of them, fewer when the source ends or rounds are used up.

        Raises the error of a group that failed more often than ``--max-group-retries``, and InputError when
        ``--on-sampling-exhausted raise`` and too few groups passed the filter.
        """
        started = self._clock()
        self._step, self._knows_step, self.places.training = rollout_id, True, False
        self._let_go()
        while True:
            self._fill()
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise RunError(f"the rollout was closed while step {rollout_id} was collected")
            if self._is_complete() or not self.places.in_flight:  # with nothing in flight, the source has ended
                break
            self._changed.clear()
            await self._changed.wait()
        return self._take(rollout_id, started)

    async def settle(self) -> None:
        self._held = True
        if self._aborts:
            for flight in self.places.in_flight.values():
                flight.stopped = True
            await self._runner.stop()

    def weights_updated(self, version: int) -> None:
        self.places.version, self.places.training = version, False
        self._let_go()
        self.places.return_stale()
        self._fill()

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._runner.go_on()

    async def state(self) -> CollectorState:
        source = self._source.state_dict([[first] for first in self.places.to_draw_again()])
        return CollectorState(
            source, {"mode": MODE, "next_step": self._step} | self.places.facts(), list(self.places.waiting)
        )

    def restore(self, state: CollectorState) -> None:
        if state.facts.get("mode") != MODE:
            restore_from_another_mode(state, self._source)
            self._knows_step = False
            return
        self._source.load_state_dict(state.source)
        self._step = state.facts["next_step"]
        self.places.restore(state.facts, state.waiting)

    async def close(self) -> None:
        """Cancel what is in flight and return it to the source; finished groups that wait stay where they are."""
        self._closed = True
        self._changed.set()
        flights = sorted(self.places.in_flight.values(), key=lambda flight: -flight.index)
        for flight in flights:
            self.places.give_back(flight, "cut_short")
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            if left:
                logger.warning("%d groups did not end when cancelled; their tasks are left behind", len(left))

    def _fill(self) -> None:
        """Dispatch what there is room for. An error of the source's is raised by ``collect``."""
        groups: list[Group] = []
        try:
            while (room := self._room()) > 0:
                groups, ended = self.places.draw(room)
                while groups:
                    flight = self.places.dispatch(groups.pop(0), self._step)
                    flight.task = asyncio.create_task(self._fly(flight), name=f"group {flight.index}")
                if ended:
                    break
        except Exception as error:  # noqa: BLE001 - any group's task may run this; who collects is to see the error
            self._fail(error)
        self._busy.set(len(self.places.in_flight))

    def _room(self) -> int:
        """Groups that may be dispatched now: what the gate leaves, and what the rest of the run needs."""
        if self._held or self._closed or not self._knows_step or self._failure is not None or self._is_exhausted():
            return 0  # for the step that uses up its rounds nothing more is drawn
        needed = self._batch * (self._num_rollout - self._step) - self.places.outstanding
        room = min(self.places.room, needed)
        most = self._config.max_groups_in_flight
        return room if most is None else min(room, most - len(self.places.in_flight))

    async def _fly(self, flight: Flight) -> None:
        seconds: float | None = None
        error: BaseException | None = None
        try:
            await self._runner.answer(flight.group, self._params, rollout_id=flight.rollout_id)
            if not flight.aborted:
                seconds = await self._runner.finish(
                    flight.group, rollout_id=flight.rollout_id, group_index=flight.index
                )
        except asyncio.CancelledError:
            if not self.places.has(flight):
                raise  # by close(), which has returned the group
            error = RunError(f"group {flight.index}: generating or scoring it was cancelled from within")
        except (Exception, SystemExit, KeyboardInterrupt) as raised:  # noqa: BLE001 - tried again, and at last raised
            error = raised
        if not self.places.has(flight):
            return  # it ended all the same while close() cancelled it
        try:
            self._land(flight, seconds, error)
        except Exception as raised:  # noqa: BLE001 - of the filter or the source; who collects is to see it
            self._fail(raised)
        self._fill()
        self._changed.set()

    def _land(self, flight: Flight, seconds: float | None, error: BaseException | None) -> None:
        if error is not None:
            if not self.places.try_again(flight, self._config.max_group_retries):
                self._fail(error)
        elif seconds is None:
            self._land_aborted(flight)
        else:
            self._judge(flight, seconds)

    def _land_aborted(self, flight: Flight) -> None:
        """Give back a group that is to be answered later. New weights may abort it as often as they come; one that
        ends so by itself every time would be answered for ever."""
        if not flight.stopped and (times := self.places.aborted_by_itself(flight)) > MOST_ABORTS:
            self.places.fail(flight)
            self._fail(
                RunError(
                    f"group {flight.index} came back aborted {times} times although nothing was told to stop: the "
                    "engine, or the function of --custom-generate-function-path, ends it so (failed is the status of a "
                    "response that cannot be had)"
                )
            )
            return
        goes_on = self._config.partial_rollout and flight.can_go_on
        self.places.give_back(flight, "aborted", reset=not goes_on)

    def _judge(self, flight: Flight, seconds: float) -> None:
        """A group is finished: let it wait, or drop it."""
        group, tally = flight.group, self._tally
        self.places.finished(flight)
        tally.reward_seconds += seconds
        tally.sampled.append(group)
        try:
            output = self._screen.judge(group, flight.index)
        except InputError:
            self.places.fail(flight)
            raise
        remaining = self.places.remaining(flight)
        if should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=self._batch):
            reason = output.reason or "unnamed"
            tally.rejected += 1
            tally.reasons[reason] += 1
            if group and reason not in UNUSABLE:
                tally.usable.append((flight.index, group))
            self.places.drop(flight)
            return
        if not output.keep:
            self._note_fallback()
            tally.fallback += 1
            mark_fallback(group)
        self.places.keep(flight)

    def _note_fallback(self) -> None:
        if self._config.max_weight_staleness == 0 and not self._said_fallback:
            self._said_fallback = True
            logger.warning(
                "%s keeps every group: with --max-weight-staleness 0 no more groups are generated than a step needs, "
                "so that each rejected one is kept by its fallback",
                self._screen.path,
            )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        else:
            logger.warning("another group failed too: %r", error)
        self._changed.set()

    def _is_exhausted(self) -> bool:
        too_few = len(self.places.waiting) < self._batch
        return too_few and len(self._tally.sampled) >= self._config.max_sampling_rounds * self._batch

    def _is_complete(self) -> bool:
        """Whether the step may be taken. Raises InputError when it may never be."""
        if self._is_exhausted():
            if self._config.on_sampling_exhausted == "raise":
                raise InputError(self._exhausted_message())
        elif len(self.places.waiting) < self._batch:
            return False
        return self._step + 1 >= self._num_rollout or self.places.may_take()

    def _take(self, rollout_id: int, started: float) -> RolloutOutput:
        falls_back = self._is_exhausted() and self._config.on_sampling_exhausted == "fallback"
        groups = [entry.group for entry in sorted(self.places.take(), key=lambda entry: entry.index)]
        tally, self._tally = self._tally, _Tally()
        if falls_back:
            groups += self._fallback(tally, self._batch - len(groups))
        for sample in leaves_of(groups):
            sample.train_step = rollout_id
        self._step = rollout_id + 1
        metrics = self._metrics(tally, groups, self._clock() - started)
        self._fill()
        ended = not groups and not tally.sampled
        return RolloutOutput(rollout_id, groups, metrics, tally.sampled, ended)

    def _fallback(self, tally: _Tally, missing: int) -> list[Group]:
        """Dropped groups to fill a step up with, the first by index."""
        chosen = [group for _, group in sorted(tally.usable, key=lambda entry: entry[0])][:missing]
        for group in chosen:
            mark_fallback(group)
        tally.fallback += len(chosen)
        self.places.take_dropped(len(chosen))
        return chosen

    def _exhausted_message(self) -> str:
        return (
            f"--max-sampling-rounds {self._config.max_sampling_rounds} is used up before --rollout-batch-size "
            f"{self._batch} groups passed {self._screen.path}: {self._tally.describe()}. Use easier or harder prompts, "
            "raise --max-sampling-rounds, or choose --on-sampling-exhausted fallback (train on dropped groups too) or "
            "shrink (train on fewer)."
        )

    def _metrics(self, tally: _Tally, groups: list[Group], waited: float) -> dict[str, float]:
        busy, in_flight = self._busy.read()
        totals = self.places.totals
        metrics = self._rollout_metrics(
            [group for group in tally.sampled if group],
            dynamic_filter={
                "rounds": math.ceil(len(tally.sampled) / self._batch),
                "groups_sampled": len(tally.sampled),
                "groups_kept": len(groups),
                "groups_dropped": tally.rejected,
                "groups_by_fallback": tally.fallback,
            },
            drop_reasons=tally.reasons,
            counters={
                **self._counters(),
                "async/engine_busy_ratio": busy,
                "async/in_flight": in_flight,
                "async/queue_depth": len(self.places.waiting),
                "async/groups_drawn": totals.drawn,
                "async/groups_returned": totals.returned,
                "async/groups_aborted": totals.aborted,
                "async/groups_retried": totals.retried,
                "async/groups_stale": totals.stale,
                "async/groups_cut_short": totals.cut_short,
            },
        )
        metrics |= staleness_metrics(groups, self.places.version)
        metrics |= {"perf/rollout_time": waited, "perf/reward_time": tally.reward_seconds}
        return {key: float(value) for key, value in metrics.items()}
