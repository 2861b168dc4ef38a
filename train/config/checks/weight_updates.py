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
    if channel == "distributed" and config.job.launcher == "inline":
        yield (
            "--weight-update-channel distributed with --launcher inline: one process has no process group with itself; "
            "use tensor, or --launcher ray"
        )
    if choose_engine(config.rollout)[0] != "sglang":
        return
    if channel in ("distributed", "disk_delta"):
        yield (
            f"--weight-update-channel {channel} with --rollout-engine sglang: servers take weights from disk or in the "
            "request; use disk or tensor"
        )
    if weights.check_weight_update_equal:
        yield (
            "--check-weight-update-equal with --rollout-engine sglang: servers do not give their weights back; leave "
            "it out, or use --rollout-engine torch"
        )
