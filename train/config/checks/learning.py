"""Learning rate and reference model."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.checks.paths import checkpoint_problems
from train.config.run import RunConfig


def learning_rate_problems(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is more than --lr {optimizer.lr:g}, the peak that it decays from"
    decay, which = optimizer.lr_decay_iters, "--lr-decay-iters"
    if decay is None:
        decay, which = config.job.num_rollout, "--num-rollout"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} leaves nothing of {which} {decay} to decay in; use at most "
            f"{decay - 1}"
        )


def reference_problems(config: RunConfig) -> Iterator[str]:
    reference = config.model.ref_load
    if reference is None:
        return
    if config.algorithm.kl_loss_coef == 0:
        yield f"--ref-load {reference} is used for the KL loss only; give --kl-loss-coef above 0 too, or leave it out"
    yield from checkpoint_problems("--ref-load", reference)
