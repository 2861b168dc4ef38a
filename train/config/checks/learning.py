"""Learning rate and reference model."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.checks.paths import checkpoint_problems
from train.config.run import RunConfig


def learning_rate_problems(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is more than --lr {optimizer.lr:g}, the peak that it decays from"
    # Not checked against --num-rollout: a long run's settings tried on a few rollouts are common and harmless.
    warmup, decay = optimizer.lr_warmup_iters, optimizer.lr_decay_iters
    if decay is not None and warmup >= decay:
        at_most = f"use at most {decay - 1}"
        yield f"--lr-warmup-iters {warmup} leaves nothing of --lr-decay-iters {decay} to decay in; {at_most}"


def reference_problems(config: RunConfig) -> Iterator[str]:
    reference = config.model.ref_load
    if reference is None:
        return
    if config.algorithm.kl_loss_coef == 0:
        yield f"--ref-load {reference} is used for the KL loss only; give --kl-loss-coef above 0 too, or leave it out"
    yield from checkpoint_problems("--ref-load", reference)
