"""The fused rotary embedding that Megatron calls under ``apply_rope_fusion``, where TransformerEngine is absent."""

from __future__ import annotations

from typing import Any

import torch


def provide_fused_rotary() -> None:
    """Fill Megatron's two slots for a fused rotary embedding unless TransformerEngine has; calling it again is fine."""
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate
    if rope_utils.fused_apply_rotary_pos_emb_thd is None:
        rope_utils.fused_apply_rotary_pos_emb_thd = rotate_packed


def rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first d elements of each head of x [s, b, heads, >= d] by angles [s, 1, 1, d] (both halves alike)."""
    if interleaved:
        raise ValueError("rotary embedding of interleaved pairs is not implemented")
    half = angles[..., : angles.shape[-1] // 2]
    rotated: torch.Tensor = _Rotate.apply(x, half.cos().to(x.dtype), half.sin().to(x.dtype))
    return rotated


def rotate_packed(
    x: torch.Tensor, cu_seqlens: torch.Tensor, angles: torch.Tensor, cp_size: int = 1, cp_rank: int = 0, **_: Any
) -> torch.Tensor:
    """Rotate packed x [t, heads, >= d]; each sequence ``cu_seqlens[i]:cu_seqlens[i + 1]`` starts at position 0."""
    if cp_size != 1:
        raise ValueError(f"packed sequences on context-parallel rank {cp_rank} of {cp_size} are not implemented")
    lengths = cu_seqlens.diff().tolist()
    packed = torch.cat([angles[:length] for length in lengths])
    return rotate(x.unsqueeze(1), packed).squeeze(1)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) on the halves of what is turned; backwards by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, -sin), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    result = x.new_empty(x.shape)
    width = 2 * cos.shape[-1]
    a, b = x[..., :width].chunk(2, dim=-1)
    first, second = result[..., :width].chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    if width < x.shape[-1]:
        result[..., width:] = x[..., width:]
    return result
