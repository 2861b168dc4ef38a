"""The synchronous collector: sampling rounds until a step has enough groups worth training on."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from filters import should_drop_dynamic_filter_output
from observability import RolloutMetrics
from observability.rollout_metrics import leaves_of
from rollout.collectors.base import CollectorState, GroupSource, WaitingGroup, restore_from_another_mode
from rollout.collectors.flight import as_drawn, oldest_version
from rollout.collectors.output import RolloutOutput
from rollout.collectors.screening import Screen, mark_fallback
from rollout.collectors.tally import Tally
from rollout.config import RewardConfig, RolloutConfig
from rollout.custom.generate import CustomGenerate
from rollout.custom.rollout import RolloutContext, RolloutFunction
from rollout.engines.protocol import Engine, SamplingParams
from rollout.generation import sampling_params
from rollout.group import GroupRunner, run_all
from rollout.rewards import Reward
from samples.errors import InputError
from samples.sample import Group, Sample, Status

MODE = "sync"
logger = logging.getLogger(__name__)


class SyncCollector:
    """Draws, generates, scores and filters groups for one rollout at a time.

    Without ``--over-sampling-batch-size`` a round waits for all of its groups, so that what is kept depends on the data
    and the policy only, never on timing. With it, groups are taken as they finish until there are enough, and what is
    left is aborted. Either way a step's groups are in the order of their index.

    No group is lost: those beyond ``--rollout-batch-size`` wait for the next rollout with ``--keep-surplus-groups``,
    else their prompts are first in line for it; aborted ones go on there from where they stopped with
    ``--partial-rollout``, else from the prompt.
    """

    def __init__(
        self,
        config: RolloutConfig,
        reward_config: RewardConfig,
        *,
        engine: Engine,
        source: GroupSource,
        reward: Reward,
        dynamic_filter: Callable[..., Any] | None,
        seed: int,
        max_context_len: int,
        generate: CustomGenerate | None = None,
        tokenizer: Any = None,
        args: UserArgs | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._source = source
        self._reward = reward
        args = args or UserArgs(config, reward_config)
        self._screen = Screen(dynamic_filter, args, config.dynamic_sampling_filter_path)
        self._rollout_metrics = RolloutMetrics(reward_config.reward_key)
        self._params = sampling_params(config)
        self._runner = GroupRunner(
            engine,
            reward,
            args,
            seed=seed,
            max_context_len=max_context_len,
            generate=generate,
            mask_offpolicy=config.mask_offpolicy_in_partial_rollout,
        )
        self._function: RolloutFunction | None = None
        if config.rollout_function_path is not None:
            path = config.rollout_function_path
            self._function = RolloutFunction.load(path, args, source, reward_config.user_code_dir)
        self._tokenizer = tokenizer
        self._waiting: list[WaitingGroup] = []  # finished groups for the next rollout
        self._own_groups = 0  # groups of a rollout function that came from no source, numbered below zero
        self._said_fallback = False

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """Groups for one training step. Raises InputError when ``--on-sampling-exhausted raise`` and rounds ran out."""
        started = time.perf_counter()
        target = self._config.rollout_batch_size
        tally = Tally(kept=self._waiting, carried=len(self._waiting))
        self._waiting = []
        if self._function is not None:
            await self._rounds_of_function(self._function, rollout_id, tally)
        elif self._config.over_sampling_batch_size is not None:
            await self._first_come(rollout_id, self._config.over_sampling_batch_size, tally)
        else:
            await self._whole_rounds(rollout_id, tally)
        if len(tally.kept) < target and tally.rounds >= self._config.max_sampling_rounds:
            self._fill_up(target, tally)
        tally.kept.sort(key=lambda entry: entry.index)
        taken, surplus = tally.kept[:target], tally.kept[target:]
        self._put_aside(surplus, tally)
        groups = [entry.group for entry in taken]
        for sample in leaves_of(groups):
            sample.train_step = rollout_id
        metrics = self._metrics(tally, groups, time.perf_counter() - started)
        ended = tally.ended and not groups and not tally.sampled
        return RolloutOutput(rollout_id, groups, metrics, tally.sampled, ended)

    async def settle(self) -> None: ...  # nothing runs between two rollouts

    def weights_updated(self, version: int) -> None: ...  # the engine's samples say it

    async def state(self) -> CollectorState:
        return CollectorState(self._source.state_dict(), {"mode": MODE}, list(self._waiting))

    def restore(self, state: CollectorState) -> None:
        if state.facts.get("mode") != MODE or not self._config.keep_surplus_groups:
            restore_from_another_mode(state, self._source)
            return
        self._source.load_state_dict(state.source)
        self._waiting = list(state.waiting)

    async def close(self) -> None: ...  # as above

    async def _whole_rounds(self, rollout_id: int, tally: Tally) -> None:
        target = self._config.rollout_batch_size
        while len(tally.kept) < target and tally.rounds < self._config.max_sampling_rounds:
            groups = self._source.next_groups(self._round_size(target, tally))
            if not groups:
                tally.ended = True
                return
            tally.rounds += 1
            entries = [self._entry(group) for group in groups]
            seconds = await run_all([self._fly(entry, rollout_id) for entry in entries])
            finished = [entry for entry, spent in zip(entries, seconds, strict=True) if spent is not None]
            tally.reward_seconds += sum(spent for spent in seconds if spent is not None)
            remaining = len(tally.kept) + len(finished)
            for entry in finished:
                remaining -= not self._judge(entry, remaining, tally)
            self._give_back([entry for entry in entries if _is_aborted(entry.group)], tally)

    def _round_size(self, target: int, tally: Tally) -> int:
        """Groups to draw: all in the first round, and then what is still missing.

        What is missing is drawn by the share of groups kept so far, plus two standard deviations of the number of draws
        that takes, since a round that ends one group short costs another round.
        """
        missing = target - len(tally.kept)
        passed = len(tally.kept) - tally.carried
        if not passed:
            return target if tally.sampled else missing
        needed = missing * len(tally.sampled) / passed
        return min(target, math.ceil(needed + 2 * math.sqrt(needed * (needed - missing) / missing)))

    async def _first_come(self, rollout_id: int, size: int, tally: Tally) -> None:
        """Rounds of ``size`` groups that are taken as they finish; a round begins once the one before cannot do."""
        target = self._config.rollout_batch_size
        flights: dict[asyncio.Task[float | None], WaitingGroup] = {}
        landed: asyncio.Queue[asyncio.Task[float | None]] = asyncio.Queue()
        try:
            while len(tally.kept) < target:
                too_few = len(tally.kept) + len(flights) < target
                if too_few and not tally.ended and tally.rounds < self._config.max_sampling_rounds:
                    groups = self._source.next_groups(size)
                    tally.ended = not groups
                    tally.rounds += bool(groups)
                    for entry in map(self._entry, groups):
                        task = asyncio.ensure_future(self._fly(entry, rollout_id))
                        flights[task] = entry
                        task.add_done_callback(landed.put_nowait)
                if not flights:
                    return
                task = await landed.get()
                self._land(task, flights, tally)
            await self._end_flights(flights, tally)
        except BaseException:
            await _cancel(flights)
            raise

    def _land(
        self, task: asyncio.Task[float | None], flights: dict[asyncio.Task[float | None], WaitingGroup], tally: Tally
    ) -> None:
        """Judge the group of a task that is done. Raises the group's own error."""
        seconds = task.result()
        remaining = len(tally.kept) + len(flights)
        entry = flights.pop(task)
        if seconds is None:
            self._give_back([entry], tally)
            return
        tally.reward_seconds += seconds
        self._judge(entry, remaining, tally)

    async def _end_flights(
        self,
        flights: dict[asyncio.Task[float | None], WaitingGroup],
        tally: Tally,
    ) -> None:
        """The step is full: judge what has finished by now, and abort the rest."""
        if self._config.partial_rollout and flights:
            await self._runner.stop()
            try:
                await asyncio.wait(flights)
            finally:
                self._runner.go_on()
        done = [task for task in flights if task.done()]
        for task in sorted(done, key=lambda task: flights[task].index):
            if task.result() is not None:
                self._land(task, flights, tally)
        await _cancel(flights)
        self._give_back(list(flights.values()), tally)

    async def _rounds_of_function(self, function: RolloutFunction, rollout_id: int, tally: Tally) -> None:
        async def generate(group: Group, params: SamplingParams | None = None) -> Group:
            await self._runner.answer(group, params or self._params, rollout_id=rollout_id)
            return group

        context = RolloutContext(generate, self._tokenizer, self._params)
        target = self._config.rollout_batch_size
        while len(tally.kept) < target and tally.rounds < self._config.max_sampling_rounds:
            groups, first, forgotten, ended = await function(rollout_id, context)
            tally.forgotten += forgotten
            tally.ended = ended
            if not groups:
                return
            tally.rounds += 1
            entries = [self._entry_of_function(group, first) for group in groups]
            seconds = await run_all([self._finish(entry, rollout_id) for entry in entries])
            tally.reward_seconds += sum(seconds)
            remaining = len(tally.kept) + len(entries)
            for entry in entries:
                remaining -= not self._judge(entry, remaining, tally)

    async def _fly(self, entry: WaitingGroup, rollout_id: int) -> float | None:
        """Answer, hook and score a group; the seconds that scoring took, or None for one that was aborted."""
        await self._runner.answer(entry.group, self._params, rollout_id=rollout_id)
        return None if _is_aborted(entry.group) else await self._finish(entry, rollout_id)

    async def _finish(self, entry: WaitingGroup, rollout_id: int) -> float:
        return await self._runner.finish(entry.group, rollout_id=rollout_id, group_index=entry.index)

    def _judge(self, entry: WaitingGroup, remaining: int, tally: Tally) -> bool:
        """Keep or drop a finished group; ``remaining`` are those of this rollout that are not dropped, it included."""
        target = self._config.rollout_batch_size
        output = self._screen.judge(entry.group, entry.index)
        tally.sampled.append(entry.group)
        if should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=target):
            tally.drop(entry, output.reason or "unnamed")
            return False
        if not output.keep:
            self._note_fallback()
            tally.fallback += 1
            mark_fallback(entry.group)
        tally.kept.append(entry)
        return True

    def _note_fallback(self) -> None:
        if self._config.over_sampling_batch_size in (None, self._config.rollout_batch_size) and not self._said_fallback:
            self._said_fallback = True
            logger.warning(
                "%s keeps every group of a first round by its fallback: no more are drawn than --rollout-batch-size "
                "needs; a larger --over-sampling-batch-size gives it some to reject",
                self._screen.path,
            )

    def _fill_up(self, target: int, tally: Tally) -> None:
        policy = self._config.on_sampling_exhausted
        if policy == "raise":
            gate = self._screen.path or "to training"
            raise InputError(
                f"--max-sampling-rounds {self._config.max_sampling_rounds} is used up before --rollout-batch-size "
                f"{target} groups passed {gate}: {tally.describe()}. "
                "Use easier or harder prompts, raise --max-sampling-rounds, or choose --on-sampling-exhausted "
                "fallback (train on dropped groups too) or shrink (train on fewer)."
            )
        if policy == "fallback":
            for entry in tally.fit_for_fallback()[: target - len(tally.kept)]:
                mark_fallback(entry.group)
                tally.fallback += 1
                tally.kept.append(entry)

    def _put_aside(self, surplus: list[WaitingGroup], tally: Tally) -> None:
        """Finished groups beyond the batch: they wait, or their prompts go back to be first in line."""
        tally.surplus = len(surplus)
        if self._config.keep_surplus_groups:
            self._waiting = surplus
            return
        self._source.return_groups([[entry.first] for entry in surplus if entry.index >= 0], reset=True)

    def _give_back(self, entries: list[WaitingGroup], tally: Tally) -> None:
        """Aborted groups: to go on, where every one of their samples can, or to begin again."""
        tally.aborted += len(entries)
        entries = sorted(entries, key=lambda entry: entry.index)
        goes_on = [entry for entry in entries if self._config.partial_rollout and _is_plain(entry.group)]
        begins = [entry for entry in entries if not any(entry is other for other in goes_on)]
        for sample in leaves_of([entry.group for entry in goes_on]):
            if sample.status is Status.ABORTED:
                sample.status = Status.PENDING
        self._source.return_groups([[entry.first] for entry in begins], reset=True)
        self._source.return_groups([entry.group for entry in goes_on])

    def _entry(self, group: Group) -> WaitingGroup:
        return WaitingGroup(group, oldest_version(group, self._engine.weight_version), as_drawn(group[0]))

    def _entry_of_function(self, group: Group, first: dict[int, Sample]) -> WaitingGroup:
        leaf = next(leaves_of(group))
        if leaf.group_index is None:
            self._own_groups += 1
            for sample in leaves_of(group):
                sample.group_index = -self._own_groups
        assert leaf.group_index is not None
        version = oldest_version(group, self._engine.weight_version)
        return WaitingGroup(group, version, first.get(leaf.group_index, replace(leaf)))

    def _metrics(self, tally: Tally, groups: list[Group], seconds: float) -> dict[str, float]:
        counts = self._source.counts
        metrics = self._rollout_metrics(
            [group for group in tally.sampled if group],
            dynamic_filter=tally.counts(len(groups)),
            drop_reasons=tally.reasons,
            counters={
                "data/bad_rows": counts.bad_rows,
                "data/too_long_prompts": counts.too_long,
                **{f"reward/{name}": count for name, count in self._reward.counters().items()},
            },
        )
        metrics |= {"perf/rollout_time": seconds, "perf/reward_time": tally.reward_seconds}
        return {key: float(value) for key, value in metrics.items()}


class UserArgs:
    """What a user's function sees as ``args``: the rollout and reward settings under their flag names.

    ``sglang_model_routers``: (host, port) of each model's router by the model's name, once SGLang servers run.
    """

    reward_key: str | None
    rollout_sample_hook_path: tuple[str, ...]

    def __init__(self, *sections: RolloutConfig | RewardConfig) -> None:
        self.sglang_model_routers: dict[str, tuple[str, int]] = {}
        for section in sections:
            for name in type(section).model_fields:
                setattr(self, name, getattr(section, name))


def _is_aborted(group: Group) -> bool:
    return any(sample.status is Status.ABORTED for sample in leaves_of(group))


def _is_plain(group: Sequence[Any]) -> bool:
    """Whether no response fanned out into several samples, of which a source could not begin again."""
    return bool(group) and all(isinstance(member, Sample) for member in group)


async def _cancel(flights: dict[asyncio.Task[float | None], WaitingGroup]) -> None:
    for task in flights:
        task.cancel()
    if flights:
        await asyncio.gather(*flights, return_exceptions=True)
