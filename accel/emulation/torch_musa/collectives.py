"""The process-group backend "mccl"."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch_musa.device import _extension


def register() -> None:
    """With a list of devices: from a bare string, torch takes the devices m, u, s and a."""
    if dist.is_available():
        dist.Backend.register_backend("mccl", _make_mccl, devices=["musa"])


def _make_mccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    carrier = dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
    return _extension.make_mccl(carrier, rank, world_size, timeout.total_seconds())
