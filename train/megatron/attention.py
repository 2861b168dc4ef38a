"""Core attention for Megatron's local layers: causal, grouped-query, padded or packed, on any device with SDPA.

Megatron's own DotProductAttention builds the whole [batch x heads, s, s] score tensor and refuses packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """A layer spec's ``core_attention``. Right padding needs no mask: no real token looks to its right."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("CausalAttention sees whole sequences only: context_parallel_size must be 1")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Padded: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].

        Packed (``packed_seq_params`` in thd format): the same without b; sequences are ``cu_seqlens_q``'s intervals.
        """
        if attention_mask is not None:
            raise ValueError("CausalAttention masks the future and nothing else: pass attention_mask=None")
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        sequences = [
            self._attend(*(x[start:end, None] for x in (query, key, value))).flatten(1)
            for start, end in pairwise(bounds)
        ]
        return torch.cat(sequences)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[s, b, heads, d] in and out."""
        grouped = query.shape[2] != key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3)
