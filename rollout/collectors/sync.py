"""The synchronous collector: sampling rounds until a step has enough groups worth training on."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from filters import should_drop_dynamic_filter_output
from observability import RolloutMetrics
from observability.rollout_metrics import leaves_of
from rollout.collectors.base import CollectorState, restore_from_another_mode
from rollout.collectors.output import RolloutOutput
from rollout.collectors.screening import Screen, mark_fallback
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.protocol import Engine
from rollout.generation import sampling_params
from rollout.group import GroupRunner, run_all
from rollout.rewards import Reward
from samples import DataSource
from samples.errors import InputError
from samples.sample import Group, Sample

MODE = "sync"


@dataclass
class _Tally:
    """What happened to the groups of one rollout."""

    sampled: list[Group] = field(default_factory=list)
    drawn: dict[int, Sample] = field(default_factory=dict)  # by id of the group: its first sample as it was drawn
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    surplus: int = 0
    fallback: int = 0
    reward_seconds: float = 0.0

    def describe(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items())) or "none"
        return (
            f"{len(self.sampled)} groups drawn in {self.rounds} rounds, {len(self.kept)} kept, "
            f"{len(self.dropped)} dropped ({reasons})"
        )


class SyncCollector:
    """Draws, generates, scores and filters groups for one rollout at a time.

    A round waits for all of its groups, so that what is kept depends on the data and the policy only, never on timing.
    Kept groups beyond ``--rollout-batch-size`` are counted; their responses go, their prompts are first in line for the
    next rollout, which answers them under its own weights.
    """

    def __init__(
        self,
        config: RolloutConfig,
        reward_config: RewardConfig,
        *,
        engine: Engine,
        source: DataSource,
        reward: Reward,
        dynamic_filter: Callable[..., Any] | None,
        seed: int,
        max_context_len: int,
    ) -> None:
        self._config = config
        self._source = source
        self._reward = reward
        self._args = UserArgs(config, reward_config)
        self._screen = Screen(dynamic_filter, self._args, config.dynamic_sampling_filter_path)
        self._rollout_metrics = RolloutMetrics(reward_config.reward_key)
        self._params = sampling_params(config)
        self._runner = GroupRunner(engine, reward, self._args, seed=seed, max_context_len=max_context_len)

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """Groups for one training step. Raises InputError when ``--on-sampling-exhausted raise`` and rounds ran out."""
        started = time.perf_counter()
        target = self._config.rollout_batch_size
        tally = _Tally()
        while len(tally.kept) < target and tally.rounds < self._config.max_sampling_rounds:
            groups = self._source.next_groups(self._round_size(target, tally))
            if not groups:  # the source has ended
                break
            tally.rounds += 1
            tally.drawn |= {id(group): dataclasses.replace(group[0]) for group in groups}  # before hooks change it
            await run_all([self._run_group(group, rollout_id, tally) for group in groups])
            self._sort_out(groups, target, tally)
        if len(tally.kept) < target and tally.rounds >= self._config.max_sampling_rounds:
            self._fill_up(target, tally)
        tally.kept.sort(key=_group_index)
        groups, surplus = tally.kept[:target], tally.kept[target:]
        tally.surplus = len(surplus)
        self._source.return_groups([[tally.drawn[id(group)]] for group in surplus], reset=True)
        metrics = self._metrics(tally, groups, time.perf_counter() - started)
        for sample in leaves_of(groups):
            sample.train_step = rollout_id
        return RolloutOutput(rollout_id, groups, metrics, tally.sampled, ended=not tally.sampled)

    async def settle(self) -> None: ...  # nothing runs between two rollouts

    def weights_updated(self, version: int) -> None: ...  # the engine's samples say it

    async def state(self) -> CollectorState:
        return CollectorState(self._source.state_dict(), {"mode": MODE})

    def restore(self, state: CollectorState) -> None:
        restore_from_another_mode(state, self._source)

    async def close(self) -> None: ...  # as above

    def _round_size(self, target: int, tally: _Tally) -> int:
        """Groups to draw: ``--over-sampling-batch-size``, or all in the first round and then what is still missing.

        What is missing is drawn by the share of groups kept so far, plus two standard deviations of the number of draws
        that takes, since a round that ends one group short costs another round.
        """
        if self._config.over_sampling_batch_size is not None:
            return self._config.over_sampling_batch_size
        missing = target - len(tally.kept)
        if not tally.kept:
            return target
        needed = missing * len(tally.sampled) / len(tally.kept)
        return min(target, math.ceil(needed + 2 * math.sqrt(needed * (needed - missing) / missing)))

    async def _run_group(self, group: Group, rollout_id: int, tally: _Tally) -> None:
        tally.reward_seconds += await self._runner.run(group, self._params, rollout_id=rollout_id)

    def _sort_out(self, groups: Sequence[Group], target: int, tally: _Tally) -> None:
        tally.sampled.extend(groups)
        remaining = len(tally.kept) + len(groups)
        for group in groups:
            output = self._screen.judge(group, _group_index(group) if group else None)
            if should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=target):
                remaining -= 1
                tally.dropped.append(group)
                tally.reasons[output.reason or "unnamed"] += 1
                continue
            if not output.keep:
                tally.fallback += 1
                mark_fallback(group)
            tally.kept.append(group)

    def _fill_up(self, target: int, tally: _Tally) -> None:
        policy = self._config.on_sampling_exhausted
        if policy == "raise":
            raise InputError(
                f"--max-sampling-rounds {self._config.max_sampling_rounds} is used up before --rollout-batch-size "
                f"{target} groups passed {self._config.dynamic_sampling_filter_path}: {tally.describe()}. "
                "Use easier or harder prompts, raise --max-sampling-rounds, or choose --on-sampling-exhausted "
                "fallback (train on dropped groups too) or shrink (train on fewer)."
            )
        if policy == "fallback":
            usable = [group for group in sorted(tally.dropped, key=_group_index) if group]
            for group in usable[: target - len(tally.kept)]:
                mark_fallback(group)
                tally.fallback += 1
                tally.kept.append(group)

    def _metrics(self, tally: _Tally, groups: list[Group], seconds: float) -> dict[str, float]:
        counts = self._source.counts
        metrics = self._rollout_metrics(
            [group for group in tally.sampled if group],
            dynamic_filter={
                "rounds": tally.rounds,
                "groups_sampled": len(tally.sampled),
                "groups_kept": len(groups),
                "groups_dropped": len(tally.dropped),
                "groups_surplus": tally.surplus,
                "groups_by_fallback": tally.fallback,
            },
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
    """What a user's function sees as ``args``: the rollout and reward settings under their flag names."""

    reward_key: str | None

    def __init__(self, *sections: RolloutConfig | RewardConfig) -> None:
        for section in sections:
            for name in type(section).model_fields:
                setattr(self, name, getattr(section, name))


def _group_index(group: Group) -> int:
    index = group[0].group_index
    assert index is not None
    return index
