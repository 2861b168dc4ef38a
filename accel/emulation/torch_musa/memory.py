"""Memory of a device, in bytes. There is no cache, so what is reserved is what is allocated."""

from __future__ import annotations

import torch
from torch_musa.device import DeviceLike, _extension, _get_device_index

OutOfMemoryError = torch.OutOfMemoryError


class MUSAPluggableAllocator:
    """Libraries import it at their top; host memory has no allocator to exchange."""

    def __init__(self, *_: object) -> None:
        raise RuntimeError("the emulated MUSA device has no pluggable allocators")


def memory_allocated(device: DeviceLike = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    allocated, peak, allocations, frees, failures, _ = _extension.memory_counts(_get_device_index(device))
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": allocated,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": allocations - frees,
        "allocation.all.allocated": allocations,
        "allocation.all.freed": frees,
        "num_alloc_retries": 0,
        "num_ooms": failures,
    }


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    _extension.reset_peak(_get_device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total). Collectives hold memory that is not free, and that the allocator does not know of."""
    total = _extension.capacity()
    allocated, *_, outside = _extension.memory_counts(_get_device_index(device))
    return total - allocated - outside, total


def empty_cache() -> None:
    return


def ipc_collect() -> None:
    return
