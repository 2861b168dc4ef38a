"""MXFP4 expert blocks as gpt-oss is published: 32 values of 4 bits share one power of two (OCP MX 1.0, section 5).

``NAME_blocks`` uint8 [experts, rows, groups, 16] holds two values a byte, the first in the low half, and
``NAME_scales`` uint8 [experts, rows, groups] the exponents plus 127. The tensor that they stand for,
``NAME`` [experts, 32 x groups, rows], has its last two axes the other way round.
"""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the fourth bit is the sign


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., 32 x groups, rows] of blocks [..., rows, groups, 16] and scales [..., rows, groups]."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1)
    values = torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - _BIAS)
    return values.flatten(-2).transpose(-1, -2).contiguous()


def stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of blocks and scales of a tensor [experts, columns, rows]."""
    experts, columns, rows = shape
    groups = columns // GROUP
    return (experts, rows, groups, GROUP // 2), (experts, rows, groups)
