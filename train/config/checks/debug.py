"""Recording and replay: one half of a run without the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from train.config.run import RunConfig


def debug_problems(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    load, save = debug.load_debug_rollout_data, debug.save_debug_rollout_data
    if debug.debug_rollout_only and debug.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only leave nothing to do together; leave one out"
    elif debug.debug_train_only and load is None:
        yield "--debug-train-only needs rollouts to train on: give --load-debug-rollout-data DIR"
    elif debug.debug_rollout_only and load is not None:
        yield f"--load-debug-rollout-data {load} is trained on, which --debug-rollout-only leaves out; leave one out"
    if load is not None and not Path(load).is_dir():
        yield f"--load-debug-rollout-data {load}: no such directory; give the one that --save-debug-rollout-data wrote"
    if save is not None and Path(save).exists() and not Path(save).is_dir():
        yield f"--save-debug-rollout-data {save}: is a file; give a directory"
    if load is not None and save is not None:
        yield f"--save-debug-rollout-data {save}: a replay makes no rollouts that could be recorded; leave it out"
    if debug.debug_rollout_only and config.output.save_hf is not None:
        yield f"--save-hf {config.output.save_hf}: --debug-rollout-only trains no model to write; leave one out"
