"""RMS norm for Megatron's layer specs, with a backward pass of its own on the host."""

from __future__ import annotations

from collections.abc import Callable
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


class QueryHeadsNorm(torch.nn.Module):
    """RMS norm over all query heads of a token at once; its weight is split as they are over tensor-parallel ranks."""

    heads_field = "num_attention_heads"

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.width = getattr(config, self.heads_field) * hidden_size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // config.tensor_model_parallel_size))
        if config.tensor_model_parallel_size > 1:
            from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., local heads, head dim] of any dtype, computed in float32."""
        flat = x.flatten(-2).float()
        total = self._over_ranks(flat.square().sum(-1, keepdim=True))
        normed = flat * (total / self.width + self.eps).rsqrt()
        return (normed.to(x.dtype) * self.weight).view(x.shape)

    def _over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        if self.weight.numel() == self.width:
            return part
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        # The first sums forwards, the second backwards: each rank's heads depend on the sum over all.
        total: torch.Tensor = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(part))
        return total


class KeyHeadsNorm(QueryHeadsNorm):
    """The same over all key heads."""

    heads_field = "num_query_groups"


class PostNorm(torch.nn.Module):
    """A layer spec's ``…_bda``: adds the norm of what attention or MLP gave, instead of that itself, to the residual.

    Called as Megatron's own is: ``bda(training, fused)`` gives the function of ``(output, bias), residual, dropout``.
    """

    def __init__(self, config: Any, eps: float | None = None) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon if eps is None else eps)

    def forward(self, _training: bool, _fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(
        self, output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        x, bias = output
        if dropout:
            raise ValueError(f"PostNorm has no dropout, not {dropout}")
        normed: torch.Tensor = self.norm(x if bias is None else x + bias)
        return residual + normed


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
