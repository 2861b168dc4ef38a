"""Giving the trainer's processes back between steps, where that cannot work or gains nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engines.choice import choose_engine
from train.config.run import RunConfig


def release_problems(config: RunConfig) -> Iterator[str]:
    if not config.job.release_train:
        return
    flag = "--release-train"
    if config.job.launcher == "inline":
        yield f"{flag} with --launcher inline: rollout and trainer are one process, which stays; use --launcher ray"
    if config.debug.replays or config.debug.debug_rollout_only:
        yield f"{flag}: this run does not both generate and train, so there is no time between steps; leave it out"
        return
    mode = config.rollout.rollout_mode
    if mode != "sync":
        yield (
            f"{flag} with --rollout-mode {mode}: rollout and training go on at the same time, so nothing is free for "
            "either; leave it out, or use sync"
        )
    if config.weights.weight_update_channel == "disk_delta":
        yield (
            f"{flag} with --weight-update-channel disk_delta: a trainer that is made anew does not know what the "
            "engine holds, so every update would be a whole one; use disk"
        )
    if config.weights.weight_update_channel == "distributed" and choose_engine(config.rollout)[0] == "sglang":
        yield (
            f"{flag} with --weight-update-channel distributed and --rollout-engine sglang: servers keep a group with "
            "the process of the trainer; use disk or tensor"
        )
    if config.checkpoint.async_save:
        yield f"{flag} with --async-save: the process that would write it ends with the step; leave one out"
    if config.parallel.reload_process_groups:
        yield f"{flag} with --reload-process-groups: all groups end with the processes; leave the latter out"
