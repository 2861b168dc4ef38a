"""Core attention for Megatron's local layers: causal, grouped-query, padded or packed, on any device with SDPA.

Megatron's own DotProductAttention builds the whole [batch x heads, s, s] score tensor and refuses packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """A layer spec's ``core_attention``. Right padding needs no mask: no real token looks to its right.

    window: how many tokens, its own among them, a token sees; None: all before it. sinks: each head has a learned
    logit in its softmax that takes weight from the tokens and gives nothing (``softmax_offset``, as Megatron names it).
    turned_scale: (n, factor) by which the product of the first n elements of query and key counts more.
    """

    def __init__(
        self,
        config: Any,
        softmax_scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        turned_scale: tuple[int, float] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("CausalAttention sees whole sequences only: context_parallel_size must be 1")
        self.scale = softmax_scale
        self.window = window
        self.turned_scale = turned_scale
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(config.num_attention_heads // config.tensor_model_parallel_size, dtype=config.params_dtype)
            )
            if config.tensor_model_parallel_size > 1:
                from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

                set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

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
        if self.turned_scale is not None:
            turned, factor = self.turned_scale
            query = torch.cat((query[..., :turned] * factor, query[..., turned:]), dim=-1)
        grouped = query.shape[2] != key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = self._mask(q)
        if self.softmax_offset is not None:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))  # a key whose logits the mask sets, of a value of zeros
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3)

    def _mask(self, q: torch.Tensor) -> torch.Tensor | None:
        """What is added to the logits of q [b, heads, s, d], or what is seen; None where that is all but the future."""
        length = q.shape[2]
        sees_all = self.window is None or self.window >= length
        if sees_all and self.softmax_offset is None:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if not sees_all:
            seen = seen.triu(1 - (self.window or 0))
        if self.softmax_offset is None:
            return seen
        added = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
        sinks = self.softmax_offset.to(q.dtype)[:, None, None].expand(-1, length, 1)
        return torch.cat((added.expand(len(sinks), -1, -1), sinks), dim=-1)
