"""The loss of one micro-batch, and what is measured beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.config.sections import AlgorithmConfig
from train.importance import Correction, importance_correction
from train.losses import VocabShard, clipped_surrogate, kept_token_log_probs, kl_estimate, token_log_probs
from train.megatron.micro_batch import MicroBatch

# What one micro-batch adds up to. The first four are weighted like the loss, so that
# loss = pg_loss - entropy_coef * entropy + kl_loss_coef * kl; the others are sums over tokens, the last three of the
# correction for what the rollout sampled from (--use-tis).
SUMS = ("loss", "pg_loss", "entropy", "kl", "clipped", "ratio", "tis_ratio", "tis_weight", "tis_clipped")


@dataclass(frozen=True)
class TokenScores:
    """The policy's view of T trained tokens, fp32 [T] each: log-probabilities and entropies of the whole distribution,
    and the log-probabilities that the importance ratio compares (among the ids that top-p and top-k kept)."""

    log_probs: Tensor
    entropy: Tensor
    ratio_log_probs: Tensor


def score_tokens(logits: Tensor, micro_batch: MicroBatch, temperature: float, shard: VocabShard) -> TokenScores:
    """Scores of a micro-batch's trained tokens from logits [B, S, local vocabulary].

    With top-p or top-k on, a token was drawn from the kept ids alone: old and new policy are then compared on that set,
    while rollout and reference log-probabilities are of the whole distribution and are compared with that.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    rows, targets = micro_batch.rows, micro_batch.targets
    log_probs, entropy = token_log_probs(flat, rows, targets, temperature=temperature, shard=shard)
    if micro_batch.kept_ids is None:
        return TokenScores(log_probs, entropy, log_probs)
    assert micro_batch.kept_tokens is not None
    assert micro_batch.has_kept is not None
    kept = kept_token_log_probs(
        flat, rows, targets, micro_batch.kept_ids, micro_batch.kept_tokens, temperature=temperature, shard=shard
    )
    return TokenScores(log_probs, entropy, torch.where(micro_batch.has_kept, kept, log_probs))


def policy_objective(scores: TokenScores, micro_batch: MicroBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """This micro-batch's share of the loss (differentiable), and its ``SUMS`` [9].

    Without ``old_log_probs`` the current policy is the old one: the ratio is 1 and only its gradient counts.
    """
    new, weights = scores.ratio_log_probs, micro_batch.weights
    old = new.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
    eps_high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    surrogate, ratio, clipped = clipped_surrogate(
        new, old, micro_batch.advantages, eps_low=algorithm.eps_clip, eps_high=eps_high
    )
    corrected = torch.zeros(3, device=new.device)
    if algorithm.use_tis:
        correction = _correction(scores, micro_batch, algorithm)
        surrogate = surrogate * correction.weights
        corrected = torch.stack([correction.ratios.sum(), correction.weights.sum(), correction.outside.sum()])
    pg_loss, entropy = weights.dot(surrogate), weights.dot(scores.entropy)
    loss = pg_loss if algorithm.entropy_coef == 0 else pg_loss - algorithm.entropy_coef * entropy
    kl = torch.zeros_like(pg_loss)
    if micro_batch.reference_log_probs is not None:
        kl = weights.dot(kl_estimate(scores.log_probs, micro_batch.reference_log_probs, algorithm.kl_loss_type))
        loss = loss + algorithm.kl_loss_coef * kl
    sums = torch.stack([loss, pg_loss, entropy, kl, clipped.sum(), ratio.sum()]).detach()
    return loss, torch.cat([sums, corrected])


def _correction(scores: TokenScores, micro_batch: MicroBatch, algorithm: AlgorithmConfig) -> Correction:
    """By exp(old - rollout), where the old policy is the current one unless its log-probabilities are there."""
    assert micro_batch.rollout_log_probs is not None
    old = scores.log_probs.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
    return importance_correction(
        old,
        micro_batch.rollout_log_probs,
        micro_batch.sample_of,
        micro_batch.num_samples,
        level=algorithm.tis_level,
        mode=algorithm.tis_mode,
        low=algorithm.tis_clip_low,
        high=algorithm.tis_clip,
    )


def rollout_difference(scores: TokenScores, micro_batch: MicroBatch) -> Tensor:
    """Sum and maximum of |trainer - rollout| log-probability over the trained tokens, fp32 [2]; zeros without any."""
    if micro_batch.rollout_log_probs is None or not len(micro_batch.rows):
        return torch.zeros(2, device=scores.log_probs.device)
    difference = (scores.log_probs.detach() - micro_batch.rollout_log_probs).abs()
    return torch.stack([difference.sum(), difference.max()])
