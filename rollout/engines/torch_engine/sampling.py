"""From logits to tokens: temperature, top-k, top-p and an inverse CDF driven by given uniform numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.engines.protocol import SamplingParams

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
    log_probs = torch.log_softmax(scaled, dim=-1)
    allowed = log_probs if forbidden is None else log_probs.masked_fill(forbidden, -torch.inf)
    kept = keep_likeliest(allowed, plan) if plan.filters else None
    probs = allowed.exp()
    if kept is not None:
        probs *= kept
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens.clamp_(max=logits.shape[-1] - 1)  # only rows of NaN reach past the end; their log-probability tells
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy, allowed.argmax(dim=-1), tokens)
    return Sampled(tokens, log_probs.gather(1, tokens[:, None])[:, 0], kept)


def keep_likeliest(log_probs: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """What top-k and then top-p (on the renormalised rest) leave: bool [rows, vocab], at least one a row.

    Top-k keeps every token that ties with the k-th. Top-p keeps a token when those likelier than it sum to less than
    ``top_p`` (Holtzman et al. 2020), as the logits processors of ``transformers`` do.
    """
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if plan.top_k is not None:
        keep = ordered >= ordered.gather(1, (plan.top_k - 1).expand(len(ordered), 1))
    if plan.top_p is not None:
        probs = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        before = probs.cumsum(dim=-1) - probs
        keep = keep & (before < plan.top_p)
        keep[:, 0] = True
    keep = keep & (ordered > -torch.inf)
    return torch.zeros_like(keep).scatter_(1, order, keep)
