"""Modes in which rollout and training go on at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.run import RunConfig


def overlap_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rollout_mode != "fully-async":
        return
    if rollout.over_sampling_batch_size is not None:
        yield (
            f"--over-sampling-batch-size {rollout.over_sampling_batch_size}: --rollout-mode fully-async draws no "
            "rounds; --max-weight-staleness says how far it generates ahead; leave it out"
        )
    if rollout.rollout_function_path is not None:
        yield (
            f"--rollout-function-path {rollout.rollout_function_path}: --rollout-mode fully-async draws and generates "
            "by itself; use --custom-generate-function-path and --data-source-path, or --rollout-mode sync"
        )
    most = rollout.max_groups_in_flight
    ahead = (rollout.max_weight_staleness + 1) * rollout.rollout_batch_size
    if most is not None and most > ahead:
        yield (
            f"--max-groups-in-flight {most} is more than --max-weight-staleness {rollout.max_weight_staleness} ever "
            f"allows, {ahead} groups of --rollout-batch-size {rollout.rollout_batch_size}; use at most {ahead}, or "
            "leave it out"
        )
