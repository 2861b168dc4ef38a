"""Correction for sampling from another distribution than the trainer's old policy: rounding, kernels, older weights.

A token was drawn from the rollout engine's distribution, while the policy gradient is an expectation under the old
policy as the trainer computes it. Each token's loss is therefore weighted by exp(old - rollout), bounded
(``--use-tis``: truncated importance sampling). Weights are constants: no gradient flows through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from train.losses import MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["clip", "mask"]


@dataclass(frozen=True)
class Correction:
    """fp32 or as given, [T] each: ``weights`` multiply the tokens' loss, ``ratios`` are unbounded but for overflow,
    ``outside`` (bool) says where a bound decided."""

    weights: Tensor
    ratios: Tensor
    outside: Tensor


def importance_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sample_of: Tensor,
    num_samples: int,
    *,
    level: Level,
    mode: Mode,
    low: float,
    high: float,
) -> Correction:
    """Weights of T trained tokens from log-probabilities [T] of the old policy and the rollout engine.

    sample_of: int64 [T], which of ``num_samples`` samples a token belongs to. With d = old - rollout the ratio of a
    token is exp(d); at level "sequence" exp of the sum of d over its sample's trained tokens, which is unbiased for
    whole responses and of high variance; at "geometric" exp of their mean. ``mode`` "clip" puts ratios outside
    [low, high] on the bound (truncation, for low 0), "mask" gives them weight 0. Ratios are limited to exp(+-20).
    """
    with torch.no_grad():
        log_ratio = old_log_probs - rollout_log_probs
        if level != "token":
            of_sample = log_ratio.new_zeros(num_samples).index_add_(0, sample_of, log_ratio)
            if level == "geometric":
                counts = torch.bincount(sample_of, minlength=num_samples).clamp_min(1)
                of_sample = of_sample / counts
            log_ratio = of_sample[sample_of]
        ratios = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (ratios < low) | (ratios > high)
        weights = ratios.clamp(low, high) if mode == "clip" else ratios.masked_fill(outside, 0.0)
    return Correction(weights, ratios, outside)
