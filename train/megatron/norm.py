"""RMS norm for Megatron's layer specs; Megatron's own needs Apex or TransformerEngine under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Scale of [hidden_size] ones; under sequence parallelism its gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it
