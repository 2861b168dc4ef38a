"""Core attention for Megatron's local layers: causal, grouped-query, padded or packed, on any device with SDPA.

Megatron's own DotProductAttention builds the whole [batch x heads, s, s] score tensor and refuses packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK = 256  # queries that attend in a window at once


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
        """[s, b, heads, d] in and out. No tensor is as large as s x s."""
        if self.turned_scale is not None:
            turned, factor = self.turned_scale
            query = torch.cat((query[..., :turned] * factor, query[..., turned:]), dim=-1)
        grouped = query.shape[2] != key.shape[2]
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        length, width = query.shape[0], value.shape[-1]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.softmax_offset is not None:
            q, k, v = _with_sink(q, k, v, self.softmax_offset.to(q.dtype) / scale)
        widest = max(q.shape[-1], v.shape[-1])  # kernels without a score tensor take heads of one width
        q, k, v = (x if x.shape[-1] == widest else pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
        attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=grouped)
        if self.window is None or self.window >= length:
            if self.softmax_offset is not None:  # a key before the first token's, and a query there, so that all fits
                q = pad(q, (0, 0, 1, 0))
            out = attend(q, k, v, is_causal=True)[:, :, -length:]
        else:
            out = self._in_window(q, k, v, attend)
        return out[..., :width].permute(2, 0, 1, 3)

    def _in_window(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Blocks of queries [b, heads, s, d], each with the keys that any of it sees."""
        assert self.window is not None
        length = q.shape[2]
        sinks = k.shape[2] - length
        parts = []
        for start in range(0, length, BLOCK):
            end, oldest = min(start + BLOCK, length), max(0, start - self.window + 1)
            keys = slice(sinks + oldest, sinks + end)
            age = torch.arange(start, end, device=q.device)[:, None] - torch.arange(oldest, end, device=q.device)
            seen = pad((age >= 0) & (age < self.window), (sinks, 0), value=True)
            seen_k, seen_v = (torch.cat((x[:, :, :sinks], x[:, :, keys]), dim=2) for x in (k, v))
            parts.append(attend(q[:, :, start:end], seen_k, seen_v, attn_mask=seen))
        return torch.cat(parts, dim=2)


def _with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A key before the first, of a value of zeros, with which every query of head h has the product ``logits[h]``."""
    q = torch.cat((q, logits[:, None, None].expand(*q.shape[:3], 1)), dim=-1)
    k = pad(k, (0, 1, 1, 0))
    k[:, :, 0, -1] = 1
    return q, k, pad(v, (0, 0, 1, 0))
