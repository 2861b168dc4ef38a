"""Buffers and views for one forward pass, made once per number of tokens.

For a small model a view costs as much as the arithmetic that it leads to: with fixed buffers all of them are taken
beforehand, and a layer is matrix products and a few elementwise operations.
"""

from __future__ import annotations

from functools import cached_property

import torch

from rollout.engines.torch_engine.dense_weights import DenseShape


class Workspace:
    """Room for ``count`` tokens in buffers of ``rows`` rows (``rows`` >= ``count``; the rest is padding)."""

    def __init__(self, shape: DenseShape, count: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        group, dim, kv_heads = shape.group, shape.head_dim, shape.kv_heads

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.count, self.rows = count, rows
        self.normed = zeros(rows, shape.hidden)
        self.qkv = zeros(rows, kv_heads * (group + 2) * dim)
        self.context = zeros(rows, shape.heads * dim)
        self.gate_up = zeros(rows, 2 * shape.intermediate)
        self.gate, self.up = self.gate_up.chunk(2, dim=-1)
        self.heads = self.qkv[:count].view(count, kv_heads, group + 2, dim)
        self.rotary = self.heads[:, :, : group + 1]  # queries and keys
        self.rotary_normed = torch.zeros_like(self.rotary, memory_format=torch.contiguous_format)
        self.queries = self.heads[:, :, :group]  # [count, kv heads, group, head dim]
        self.new_keys_values = self.heads[:, :, group:].flatten(0, 1).transpose(0, 1)  # [2, count * kv heads, head dim]
        self.context_heads = self.context[:count].view(count * kv_heads, group, dim)

    @cached_property
    def rotary_complex(self) -> torch.Tensor:
        return as_complex(self.rotary)

    @cached_property
    def rotary_normed_complex(self) -> torch.Tensor:
        return as_complex(self.rotary_normed)

    @cached_property
    def queries_flat(self) -> torch.Tensor:
        return self.queries.flatten(0, 1)


def as_complex(heads: torch.Tensor) -> torch.Tensor:
    """float32 [..., head dim] as complex64 [..., head dim / 2]: neighbours are real and imaginary part."""
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
