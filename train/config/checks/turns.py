"""Turns on the same devices, and what cannot wait for its turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollout.engines.choice import choose_engine
from train.config.run import RunConfig


def turn_problems(config: RunConfig) -> Iterator[str]:
    if not config.takes_turns:
        return
    offload, engine = config.offload, choose_engine(config.rollout)[0]
    asked = _asked(config)
    mode = config.rollout.rollout_mode
    if mode != "sync":
        yield (
            f"{asked} with --rollout-mode {mode}: generating and training at the same time, the two sides cannot take "
            "turns; use --rollout-mode sync, or leave it out"
        )
    if config.sglang.rollout_external_engine_addrs:
        yield (
            f"{asked} with --rollout-external-engine-addrs: servers that somebody else started are on devices of their "
            "own and keep their memory; leave one of them out"
        )
    if config.job.release_train and offload.offloads_trainer:
        yield (
            "--release-train ends the trainer's processes between steps, so --offload-train (on with --colocate and "
            "--offload) has nothing to move; leave one out, or give --no-offload-train"
        )
    if config.weights.weight_update_channel == "disk_delta" and offload.offloads_rollout:
        yield (
            "--weight-update-channel disk_delta: an engine that gives its weights back (--offload-rollout) needs all "
            "of them in every update; use disk or auto, or --no-offload-rollout"
        )
    if config.weights.weight_update_channel == "distributed" and offload.colocate:
        yield (
            "--weight-update-channel distributed with --colocate: a device's process groups take one rank of a device, "
            "and both ends would be on the same; use tensor or disk"
        )
    if offload.colocate:
        shared = 1 if engine == "torch" else config.actor_world_size
        given = config.job.rollout_num_gpus
        if given is not None and given != shared:
            yield (
                f"--rollout-num-gpus {given} with --colocate: rollout uses the devices that train"
                f"{', the first of them' if engine == 'torch' else f', {shared}'}; leave it out"
            )
        elif engine == "sglang" and shared % config.job.rollout_num_gpus_per_engine:
            yield (
                f"--colocate: {shared} devices that train do not hold whole engines of --rollout-num-gpus-per-engine "
                f"{config.job.rollout_num_gpus_per_engine}; use a divisor of {shared}"
            )
        if engine == "sglang" and config.job.launcher == "inline":
            yield "--colocate with --launcher inline and --rollout-engine sglang: use --launcher ray"
        if config.job.actor_num_nodes > 1 and engine == "sglang":
            yield (
                f"--colocate with --rollout-engine sglang and --actor-num-nodes {config.job.actor_num_nodes}: this "
                "version starts servers on one machine; use 1"
            )
    if offload.offload_dir is not None and not Path(offload.offload_dir).is_dir():
        yield f"--offload-dir {offload.offload_dir}: no such directory; make it, or leave it out"


def _asked(config: RunConfig) -> str:
    """The flag that asks for turns."""
    offload = config.offload
    given = {
        "--colocate": offload.colocate,
        "--offload": offload.offload,
        "--offload-train": offload.offload_train,
        "--offload-rollout": offload.offload_rollout,
    }
    return next(flag for flag, on in given.items() if on)
