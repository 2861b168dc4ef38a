"""RMS norm for Megatron's layer specs, with a backward pass of its own on the host."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) * weight over the last axis, computed in float32 and rounded as Hugging Face does it.

    Megatron's own needs Apex or TransformerEngine under sequence parallelism, where the weight's gradient has to be
    summed over the tensor-parallel ranks. On the host, torch's takes its backward pass apart into a dozen operations.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape with ``hidden_size`` last; the result has the dtype of ``x``."""
        if not x.is_cpu:
            return super().forward(x)
        normalised: torch.Tensor = _HostRMSNorm.apply(x, self.weight, self.eps)
        return normalised


class _HostRMSNorm(torch.autograd.Function):
    """With n = x / rms(x) and g the gradient of the result: dx = (g w - n mean(g w n)) / rms(x), dw = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normalised = (wide * inverse_rms).to(x.dtype)
        ctx.save_for_backward(normalised, weight, inverse_rms)
        return normalised * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normalised, weight, inverse_rms = ctx.saved_tensors
        wide, scale = gradient.float(), weight.float()
        by_element = wide * normalised
        along = torch.matmul(by_element, scale).unsqueeze(-1).div_(scale.numel())
        dx = (wide * scale).addcmul_(normalised.float(), along, value=-1).mul_(inverse_rms)
        dweight = by_element.flatten(0, -2).sum(0)
        return dx.to(gradient.dtype), dweight.to(weight.dtype), None
