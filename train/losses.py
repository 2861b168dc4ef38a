"""Log-probabilities, entropy and the policy's loss, on logits whose vocabulary may be split over tensor-parallel ranks.

Everything works on T selected tokens (the response tokens that take gradient). A token's share of the loss is its
weight, fixed beforehand from the whole batch (``token_weights``), so a sum over micro-batches and data-parallel ranks
is the loss of the whole batch however it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # logits worked on at once in fp32 (64 MiB), so that no second copy of all of them exists
MAX_LOG_RATIO = 20.0  # exp of more would overflow to infinity, and infinity times an advantage of 0 is NaN

Aggregation = Literal["token-mean", "sequence-mean"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary: ids from ``start``; ``group`` (None: one rank) holds the other columns."""

    start: int
    group: dist.ProcessGroup | None = None

    def reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values


def token_log_probs(
    logits: Tensor, rows: Tensor, targets: Tensor, *, temperature: float, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy, under softmax(logits / temperature); fp32 [T] each.

    logits: [N, local vocabulary], any float dtype; rows: int64 [T], which rows of it; targets: int64 [T], token ids.
    Both outputs are differentiable; the gradient is exact on every tensor-parallel rank.
    """
    result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(logits, rows, targets, temperature, shard)
    return result


class _TokenLogProbs(torch.autograd.Function):
    """With z = logits / temperature, m its maximum, S = sum exp(z - m) and W = sum exp(z - m) (z - m) over the whole
    vocabulary: log p(t) = z(t) - m - log S and H = log S - W / S. Backward recomputes p chunk by chunk:
    d log p(t) / dz = onehot(t) - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        maxima, sums = [], []
        for part in _chunks(rows, logits.shape[1]):
            z = logits.index_select(0, rows[part]).float().div_(temperature)
            local, inside = _local_ids(targets[part], shard, logits.shape[1])
            target = z.gather(1, local[:, None]).squeeze(1) * inside
            highest = z.amax(1)
            z -= highest[:, None]
            p = z.exp()
            sums.append(torch.stack([p.sum(1), (p * z).sum(1), target]))
            maxima.append(highest)
        highest, (total, weighted, target) = torch.cat(maxima), torch.cat(sums, 1)
        if shard.group is not None:
            own = highest
            highest = shard.reduce(own.clone(), dist.ReduceOp.MAX)
            scale = (own - highest).exp()
            parts = torch.stack([total * scale, (weighted + (own - highest) * total) * scale, target])
            total, weighted, target = shard.reduce(parts, dist.ReduceOp.SUM)
        log_total = total.log()
        log_partition = highest + log_total
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, rows, targets, log_partition, entropy)
        ctx.temperature, ctx.shard = temperature, shard
        ctx.set_materialize_grads(False)
        return target - log_partition, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        grad_log_probs, grad_entropy = grads
        logits, rows, targets, log_partition, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for part in _chunks(rows, logits.shape[1]):
            log_p = logits.index_select(0, rows[part]).float().div_(ctx.temperature).sub_(log_partition[part, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_entropy is not None:
                grad.sub_(log_p.add_(entropy[part, None]).mul_(p).mul_(grad_entropy[part, None]))
            if grad_log_probs is not None:
                grad.addcmul_(p, grad_log_probs[part, None], value=-1)
                local, inside = _local_ids(targets[part], ctx.shard, logits.shape[1])
                grad.scatter_add_(1, local[:, None], (grad_log_probs[part] * inside)[:, None])
            grad_logits.index_add_(0, rows[part], grad.div_(ctx.temperature).to(logits.dtype))
        return grad_logits, None, None, None, None


def kept_token_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_tokens: Tensor,
    *,
    temperature: float,
    shard: VocabShard,
) -> Tensor:
    """Log-probability of each target among the ids that top-p and top-k kept, fp32 [T]; differentiable.

    kept_ids: int64 [K], all tokens' ids one after another; kept_tokens: int64 [K], the token 0 to T - 1 that each id
    belongs to. A token without kept ids gets 0 and no gradient.
    """
    result: Tensor = _KeptLogProbs.apply(logits, rows, targets, kept_ids, kept_tokens, temperature, shard)
    return result


class _KeptLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        kept_ids: Tensor,
        kept_tokens: Tensor,
        temperature: float,
        shard: VocabShard,
    ) -> Tensor:
        local, inside = _local_ids(kept_ids, shard, logits.shape[1])
        token, local = kept_tokens[inside], local[inside]
        z = logits[rows[token], local].float() / temperature
        highest = torch.full((len(rows),), -torch.inf, device=logits.device)
        highest = shard.reduce(highest.scatter_reduce_(0, token, z, "amax"), dist.ReduceOp.MAX)
        highest = highest.masked_fill(highest.isneginf(), 0.0)  # tokens without kept ids
        is_target = kept_ids[inside] == targets[token]
        sums = torch.zeros(2, len(rows), device=logits.device)
        sums[0].index_add_(0, token, (z - highest[token]).exp())
        sums[1].index_add_(0, token, z * is_target)
        total, target = shard.reduce(sums, dist.ReduceOp.SUM)
        has_kept = total > 0
        log_partition = highest + total.clamp_min(torch.finfo(torch.float32).tiny).log()
        ctx.save_for_backward(logits, rows[token], local, token, is_target, (z - log_partition[token]).exp())
        ctx.temperature = temperature
        return torch.where(has_kept, target - log_partition, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, row, local, token, is_target, p = ctx.saved_tensors
        grad = grads[0][token] * (is_target.float() - p) / ctx.temperature
        grad_logits = torch.zeros_like(logits)
        grad_logits.index_put_((row, local), grad.to(logits.dtype), accumulate=True)
        return grad_logits, None, None, None, None, None, None


def _local_ids(ids: Tensor, shard: VocabShard, width: int) -> tuple[Tensor, Tensor]:
    """Columns of the ids on this rank (0 where another rank holds it), and whether this rank holds it."""
    local = ids - shard.start
    inside = (local >= 0) & (local < width)
    return local * inside, inside


def _chunks(rows: Tensor, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, start + step) for start in range(0, max(len(rows), 1), step)]


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped policy loss per token, the importance ratio, and where clipping decided; each [T].

    ``-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)`` with ratio = exp(log_probs - old_log_probs) (arXiv
    1707.06347, eq. 7; a higher upper clip is DAPO's, arXiv 2503.14476). The log-ratio is limited to +-20 (overflow).
    """
    ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return torch.maximum(unclipped, clipped), ratio.detach(), (clipped > unclipped).detach()


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) per token from samples of the policy, [T] (J. Schulman, "Approximating KL divergence").

    With log r = reference - policy: k1 = -log r (unbiased), k2 = (log r)^2 / 2, k3 = r - 1 - log r (unbiased, never
    negative). The gradient flows through the estimate itself. log r is limited to +-20 against overflow.
    """
    log_ratio = (reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def token_weights(token_counts: NDArray[np.int64], aggregation: Aggregation) -> NDArray[np.float32]:
    """Each sample's weight per trained token, so that a weighted sum over one optimizer step's tokens is its loss; [n].

    token-mean: 1 / all tokens. sequence-mean: 1 / (sequences x own tokens), a mean over sequences of their token means.
    Samples without a trained token weigh nothing.
    """
    if aggregation == "token-mean":
        weights = np.full(len(token_counts), 1.0 / max(int(token_counts.sum()), 1))
    else:
        sequences = max(int((token_counts > 0).sum()), 1)
        weights = 1.0 / (sequences * np.maximum(token_counts, 1))
    return weights.astype(np.float32)
