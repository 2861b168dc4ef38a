"""From logits to tokens: temperature, top-k, top-p and an inverse CDF driven by given uniform numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.engines.protocol import SamplingParams

_BLOCK = 64  # tokens
_PLAIN = SamplingParams(max_new_tokens=1)


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling parameters of a batch as tensors with one entry a row (or one for all); None where no row needs it."""

    temperature: torch.Tensor | None  # float32 [rows, 1]; 1 in greedy rows
    greedy: torch.Tensor | None  # bool [rows]
    top_k: torch.Tensor | None  # int64 [rows, 1]; the vocabulary's size in rows without
    top_p: torch.Tensor | None  # float32 [rows, 1]; 1 in rows without

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p is not None

    @classmethod
    def of(cls, params: Sequence[SamplingParams | None], vocab_size: int, device: torch.device) -> SamplingPlan:
        """``params`` of each row; None in a finished row. Rows that all share their parameters get one entry."""
        if len({id(p) for p in params}) == 1:
            params = params[:1]
        rows = [p or _PLAIN for p in params]

        def column(values: list[float] | list[int], neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [p.temperature == 0 for p in rows]
        return cls(
            temperature=column([p.temperature or 1.0 for p in rows], 1.0, torch.float32),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in rows], vocab_size, torch.int64),
            top_p=column([p.top_p for p in rows], 1.0, torch.float32),
        )


@dataclass(frozen=True)
class Sampled:
    tokens: torch.Tensor  # int64 [rows]
    log_probs: torch.Tensor  # float32 [rows]: of the temperature-scaled, unfiltered distribution
    kept: torch.Tensor | None  # bool [rows, vocab]: what the filters left; None when no row has any


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, plan: SamplingPlan, forbidden: torch.Tensor | None = None
) -> Sampled:
    """Draw one token a row.

    ``logits`` [rows, vocab]; ``uniforms`` float64 [rows] in [0, 1); ``forbidden`` bool [rows, vocab] are tokens that
    may not be drawn now (end tokens before ``min_new_tokens``). The token is the first whose cumulative probability
    exceeds ``uniform``: float64, because float32 sums over a large vocabulary are off by more than a rare token.
    """
    scaled = logits.float()
    if plan.temperature is not None:
        scaled = scaled / plan.temperature
    probs = torch.softmax(scaled, dim=-1)
    allowed = probs if forbidden is None else probs.masked_fill(forbidden, 0.0)
    kept = keep_likeliest(allowed, plan) if plan.filters else None
    tokens = _inverse_cdf(allowed if kept is None else allowed * kept, uniforms)
    if plan.greedy is not None:
        likeliest = (scaled if forbidden is None else scaled.masked_fill(forbidden, -torch.inf)).argmax(dim=-1)
        tokens = torch.where(plan.greedy, likeliest, tokens)
    return Sampled(tokens, probs.gather(1, tokens[:, None])[:, 0].log(), kept)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token of each row whose cumulative weight exceeds ``uniform`` of the row's total.

    A large vocabulary is searched in two steps, by sums of blocks and then within one block: a running sum over all
    of it would cost more than the model's own arithmetic where that is small.
    """
    rows, vocab = weights.shape
    if vocab % _BLOCK or vocab < 8 * _BLOCK:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        return _search(cumulative, uniforms[:, None] * cumulative[:, -1:])
    blocks = weights.view(rows, -1, _BLOCK)
    cumulative = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _search(cumulative, target)[:, None]
    within = blocks.gather(1, block[:, :, None].expand(rows, 1, _BLOCK))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    end = cumulative.gather(1, block)
    # Counted from the block's end, so that summing in another order cannot push the target past the last weight.
    target = torch.minimum(within[:, -1:] - (end - target), torch.nextafter(within[:, -1:], torch.zeros_like(end)))
    return block[:, 0] * _BLOCK + _search(within, target)


def _search(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above ``target`` in each row; rows of NaN, which have none, get the last."""
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_(max=cumulative.shape[1] - 1)


def keep_likeliest(probs: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """What top-k and then top-p (on the renormalised rest) leave of ``probs``: bool [rows, vocab].

    Top-k keeps every token that ties with the k-th. Top-p keeps a token when those likelier than it sum to less than
    ``top_p`` (Holtzman et al. 2020), as the logits processors of ``transformers`` do.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = ordered > 0
    if plan.top_k is not None:
        keep &= ordered >= ordered.gather(1, (plan.top_k - 1).expand(len(ordered), 1))
    if plan.top_p is not None:
        cumulative = (ordered * keep).cumsum(dim=-1)
        keep &= cumulative - ordered < plan.top_p * cumulative[:, -1:]
        keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, order, keep)
