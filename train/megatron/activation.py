"""SwiGLU for Megatron's MLP: gate and up projections lie beside each other in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, silu


class SwiGLU(torch.nn.Module):
    """silu(gate) * up (Shazeer 2020). Stands where a layer spec says ``activation_func``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not config.gated_linear_unit or config.activation_func is not silu:
            raise ValueError("SwiGLU is for gated_linear_unit with activation_func silu")

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * width] -> [..., width]."""
        if not gate_up.is_cpu:
            gate, up = gate_up.chunk(2, dim=-1)
            return silu(gate) * up
        result: torch.Tensor = _HostSwiGLU.apply(gate_up)
        return result


class GeGLU(torch.nn.Module):
    """gelu(gate) * up with the tanh approximation of gelu (Shazeer 2020)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not config.gated_linear_unit:
            raise ValueError("GeGLU is for gated_linear_unit")

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * width] -> [..., width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up


class ClampedSwiGLU(torch.nn.Module):
    """gate * sigmoid(alpha * gate) * (up + 1) of clamped gate and up, as gpt-oss has it."""

    def __init__(self, config: Any, alpha: float, limit: float) -> None:
        super().__init__()
        if not config.gated_linear_unit:
            raise ValueError("ClampedSwiGLU is for gated_linear_unit")
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * width] -> [..., width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


class _HostSwiGLU(torch.autograd.Function):
    """On strided halves torch's kernels run unvectorised, and joining two gradients costs a copy: both are avoided."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.contiguous()
        activated = silu(gate)
        ctx.save_for_backward(gate, activated, up)
        return activated * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gate, activated, up = ctx.saved_tensors
        width = gate.shape[-1]
        joined = gradient.new_empty((*gate.shape[:-1], 2 * width))
        joined[..., :width] = torch.ops.aten.silu_backward(gradient * up, gate)
        torch.mul(gradient, activated, out=joined[..., width:])
        return joined
