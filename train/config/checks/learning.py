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


def correction_problems(config: RunConfig) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if not algorithm.use_tis:
        return
    if algorithm.tis_clip_low >= algorithm.tis_clip:
        yield (
            f"--tis-clip-low {algorithm.tis_clip_low:g} is not below --tis-clip {algorithm.tis_clip:g}; weights lie "
            "around 1, so use a bound below it and one above"
        )
    if algorithm.use_rollout_logprobs:
        yield (
            "--use-tis with --use-rollout-logprobs: the correction compares the trainer's own old log-probabilities "
            "with the rollout's, and would always be 1; leave one out"
        )
    for flag, value, on in (
        ("--rollout-top-p", rollout.rollout_top_p, rollout.rollout_top_p < 1),
        ("--rollout-top-k", rollout.rollout_top_k, rollout.rollout_top_k > 0),
    ):
        if on and not config.debug.replays:
            yield (
                f"{flag} {value:g} with --use-tis: tokens are sampled from the kept ones, and the rollout's "
                "log-probabilities are of the whole distribution; leave one out"
            )
