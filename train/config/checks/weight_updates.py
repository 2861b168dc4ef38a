"""Channels of weight updates that cannot work with what they are combined with."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engines.choice import choose_engine
from train.config.run import RunConfig


def weight_update_problems(config: RunConfig) -> Iterator[str]:
    if config.debug.replays or config.debug.debug_rollout_only:
        return
    weights = config.weights
    channel = weights.weight_update_channel
    serves = choose_engine(config.rollout)[0] == "sglang"
    if channel == "distributed" and config.job.launcher == "inline" and not serves:
        yield (
            "--weight-update-channel distributed with --launcher inline: one process has no process group with itself; "
            "use tensor, or --launcher ray"
        )
    if not serves:
        return
    if channel == "disk_delta":
        yield (
            "--weight-update-channel disk_delta with --rollout-engine sglang: servers take whole updates; use disk, "
            "tensor or distributed"
        )
    if weights.check_weight_update_equal:
        yield (
            "--check-weight-update-equal with --rollout-engine sglang: servers do not give their weights back; leave "
            "it out, or use --rollout-engine torch"
        )
