"""The learning rate of a rollout: warm-up, then a decay."""

from __future__ import annotations

import math

from train.config.sections import OptimizerSection


def learning_rate(rollout_id: int, config: OptimizerSection, num_rollout: int) -> float:
    """The rate for all optimizer steps of one rollout, counted from 0.

    The rate rises in equal parts to ``lr``, reached in the last of ``lr_warmup_iters`` rollouts (never 0, which would
    waste a rollout). It then falls to ``min_lr``, reached after ``lr_decay_iters`` rollouts (default: ``num_rollout``,
    so that the last rollout still learns): linear, as half a cosine, or not at all.
    """
    warmup, peak = config.lr_warmup_iters, config.lr
    if rollout_id < warmup:
        return peak * (rollout_id + 1) / warmup
    if config.lr_decay_style == "constant":
        return peak
    decay = max((config.lr_decay_iters or num_rollout) - warmup, 1)
    progress = min((rollout_id - warmup) / decay, 1.0)
    remaining = 1 - progress if config.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (peak - config.min_lr) * remaining
