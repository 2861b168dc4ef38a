"""Where a run saves and what it resumes from, as far as the flags tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from train.config.run import RunConfig


def saving_problems(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_keep is not None and not checkpoint.saves:
        yield f"--save-keep {checkpoint.save_keep}: nothing is saved; give --save-interval or --save too"
    if checkpoint.save is not None and Path(checkpoint.save).exists() and not Path(checkpoint.save).is_dir():
        yield f"--save {checkpoint.save}: is a file; give a directory"
    yield from _half_run_problems(config)
    if checkpoint.load != "auto":
        return
    if not checkpoint.saves:
        yield "--load auto takes the newest checkpoint that this run saved, but nothing is saved; give --save DIR too"
    elif checkpoint.save is None and config.output.output_dir is None:
        yield (
            "--load auto looks in the output directory, which is a new one every time; give --output-dir DIR or "
            "--save DIR"
        )


def _half_run_problems(config: RunConfig) -> Iterator[str]:
    checkpoint, debug = config.checkpoint, config.debug
    if checkpoint.save is not None and debug.replays:
        yield (
            f"--save {checkpoint.save}: a replay draws no prompts, so nothing could go on from its checkpoint; leave "
            "it out"
        )
    if checkpoint.save is not None and debug.debug_rollout_only:
        yield f"--save {checkpoint.save}: --debug-rollout-only trains nothing that could be saved; leave it out"
    if checkpoint.load is not None and debug.debug_rollout_only:
        yield (
            f"--load {checkpoint.load}: --debug-rollout-only goes on with no training; to generate with the weights of "
            "a checkpoint, give its directory to --hf-checkpoint"
        )
