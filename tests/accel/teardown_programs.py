"""What rank processes run for the tests of how communication ends."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from accel.comm import init_process_group
from accel.comm.teardown import end_communication
from accel.contract import Accelerator
from tests.accel.collective_calls import TIMEOUT


def threads_and_descriptors() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def begin_and_end(
    accelerator: Accelerator, rank: int, world: int, store: dist.Store, reloadable: bool
) -> list[tuple[int, int]]:
    """Often, with somebody who keeps hold of a group beyond its end, as Megatron's parallel state does."""
    held: list[Any] = []
    seen = []
    for number in range(6):
        init_process_group(
            accelerator, rank=rank, world_size=world, timeout=TIMEOUT, reloadable=reloadable,
            store=dist.PrefixStore(str(number), store),
        )  # fmt: skip
        kept = dist.new_group(list(range(world)))
        dist.all_reduce(torch.ones(1, device=accelerator.device()), group=kept)
        if reloadable:
            held.append(kept)
        end_communication(accelerator, training_groups=None if reloadable else held.clear)
        del kept
        seen.append(threads_and_descriptors())
    return seen


def one_fails(
    accelerator: Accelerator, rank: int, world: int, store: dist.Store, reloadable: bool
) -> tuple[str, float, bool]:
    """The last rank fails while the others wait for it in a collective. What each of them saw, and how soon."""
    init_process_group(
        accelerator, rank=rank, world_size=world, store=store, timeout=10 * TIMEOUT, reloadable=reloadable
    )
    group = dist.new_group(list(range(world)))
    saw = "nothing"
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1, device=accelerator.device()), group=group)
        if rank == world - 1:
            time.sleep(1)  # the others are waiting by then
            raise MemoryError("out of memory")
        dist.all_reduce(torch.ones(1, device=accelerator.device()), group=group)
    except (RuntimeError, MemoryError) as error:
        saw = type(error).__name__
        end_communication(accelerator, failed=True)
    return saw, time.monotonic() - started, dist.is_initialized()
