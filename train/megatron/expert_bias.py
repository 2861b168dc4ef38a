"""Experts with a bias on Megatron's local layers."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import RowParallelLinear


class BiasedExpertLinear(RowParallelLinear):
    """An expert's second linear layer. Megatron's MLP adds an expert's bias to its result in place, and without tensor
    parallelism that result is the input of a collective handed back as it is, which autograd lets nobody change."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias
