"""Waiting until device memory that was given back is free, and until there is room for what is taken again."""

from __future__ import annotations

import time
from collections.abc import Callable

from accel.contract import Accelerator, MemoryInfo
from accel.errors import AcceleratorError

_TOLERANCE = 0.2  # of the bytes: allocators round, and leave a block where something small still lies in it
_GRAIN = 32 * 1024 * 1024  # bytes that never matter
_POLL = 0.02  # seconds


class MemoryNotFreed(AcceleratorError):
    """Memory did not become free in time. Says what was given back, and what the device says."""


def wait_until_freed(accelerator: Accelerator, before: MemoryInfo, nbytes: int, timeout: float, side: str) -> None:
    """Return once ``nbytes`` more are free on the device than ``before`` they were given back.

    The allocator's word is not enough: the driver may take its time. Where device memory is the host's nothing is
    waited for, since giving back is done when the call returns. Raises MemoryNotFreed after ``timeout`` seconds.
    """
    if accelerator.capabilities.host_memory or before.free is None:
        return
    least = before.free + nbytes * (1 - _TOLERANCE) - _GRAIN
    info = _wait(accelerator, lambda info: info.free is None or info.free >= least, timeout)
    if info is not None:
        raise MemoryNotFreed(
            f"{side} gave {gib(nbytes)} of device memory back, and after {timeout:g} s (--offload-timeout) "
            f"{gib((info.free or 0) - before.free)} more than before are free"
        )


def wait_for_room(accelerator: Accelerator, nbytes: int, timeout: float, side: str) -> None:
    """Return once ``nbytes`` can be taken on the device. Raises MemoryNotFreed after ``timeout`` seconds."""
    if accelerator.capabilities.host_memory:
        return

    def room(info: MemoryInfo) -> bool:
        return info.free is None or info.free + (info.reserved or 0) - (info.allocated or 0) >= nbytes

    info = _wait(accelerator, room, timeout)
    if info is not None:
        raise MemoryNotFreed(
            f"{side} takes {gib(nbytes)} of device memory again, and after {timeout:g} s (--offload-timeout) "
            f"{gib(info.free or 0)} are free"
        )


def describe(info: MemoryInfo) -> str:
    """A process's figures in words."""
    known = {"allocated": info.allocated, "reserved": info.reserved, "free on the device": info.free}
    return ", ".join(f"{gib(value)} {name}" for name, value in known.items() if value is not None) or "no figures"


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _wait(accelerator: Accelerator, enough: Callable[[MemoryInfo], bool], timeout: float) -> MemoryInfo | None:
    """None once ``enough``; else the last figures, when time is up."""
    deadline = time.monotonic() + timeout
    while True:
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.ipc_collect()
        info = accelerator.memory_info()
        if enough(info):
            return None
        if time.monotonic() > deadline:
            return info
        time.sleep(_POLL)
