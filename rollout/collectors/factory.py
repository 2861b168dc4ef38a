"""The one place that decides which collector ``--rollout-mode`` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from observability import RolloutMetrics
from rollout.collectors.base import Collector, GroupSource
from rollout.collectors.fully_async import FullyAsyncCollector
from rollout.collectors.one_step_off import OneStepOffCollector
from rollout.collectors.screening import Screen
from rollout.collectors.sync import SyncCollector, UserArgs
from rollout.config import RewardConfig, RolloutConfig
from rollout.custom.generate import CustomGenerate
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import Engine
from rollout.group import GroupRunner
from rollout.rewards import Reward
from samples.errors import InputError


def create_collector(
    config: RolloutConfig,
    reward_config: RewardConfig,
    *,
    engine: Engine,
    source: Any,
    reward: Reward,
    dynamic_filter: Callable[..., Any] | None,
    seed: int,
    max_context_len: int,
    num_rollout: int,
    generate: CustomGenerate | None = None,
    tokenizer: Any = None,
    args: UserArgs | None = None,
) -> Collector:
    """The collector of a run of ``num_rollout`` steps; ``args`` is what functions of the user's see.

    Raises InputError for what the engine cannot do.
    """
    if config.rollout_mode != "fully-async":
        sync = SyncCollector(
            config,
            reward_config,
            engine=engine,
            source=source,
            reward=reward,
            dynamic_filter=dynamic_filter,
            seed=seed,
            max_context_len=max_context_len,
            generate=generate,
            tokenizer=tokenizer,
            args=args,
        )
        return sync if config.rollout_mode == "sync" else OneStepOffCollector(sync, source, num_rollout=num_rollout)
    args = args or UserArgs(config, reward_config)
    return FullyAsyncCollector(
        config,
        runner=GroupRunner(
            engine,
            reward,
            args,
            seed=seed,
            max_context_len=max_context_len,
            generate=generate,
            mask_offpolicy=config.mask_offpolicy_in_partial_rollout,
        ),
        source=source,
        screen=Screen(dynamic_filter, args, config.dynamic_sampling_filter_path),
        metrics=RolloutMetrics(reward_config.reward_key),
        num_rollout=num_rollout,
        aborts=_aborts_for_weights(config, engine),
        counters=lambda: source_counters(source, reward),
    )


def source_counters(source: GroupSource, reward: Reward) -> dict[str, int]:
    """What was skipped of the prompts, and events of the reward, since the start of this process."""
    counts = source.counts
    skipped = {"data/bad_rows": counts.bad_rows, "data/too_long_prompts": counts.too_long}
    return skipped | {f"reward/{name}": count for name, count in reward.counters().items()}


def _aborts_for_weights(config: RolloutConfig, engine: Engine) -> bool:
    can = {
        PauseMode.ABORT: True,
        PauseMode.RETRACT: engine.capabilities.keeps_requests_across_updates,
        PauseMode.IN_PLACE: engine.capabilities.keeps_cache_across_updates,
    }
    mode = config.pause_mode
    if not can[mode] and config.pause_generation_mode != "auto":
        raise InputError(
            f"--pause-generation-mode {mode}: this engine cannot go on with a response under new weights so; use "
            f"{' or '.join(other for other, able in can.items() if able)}"
        )
    return mode is PauseMode.ABORT or not can[mode]
