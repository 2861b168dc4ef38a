"""What rank processes run for the checks of collectives and groups. Each returns after asserting its own part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel.comm import barrier, destroy_process_group, init_process_group, new_host_group, weight_update_backend
from accel.comm.backend_strings import BackendSpec
from accel.contract import Accelerator
from accel.handoff import load_accelerator_spec

Collective = Callable[[torch.device, torch.dtype, int, int], None]


def _row(device: torch.device, dtype: torch.dtype, rank: int, size: int = 4) -> torch.Tensor:
    """Rank-dependent small integers, exact in every type."""
    return torch.arange(size, device=device, dtype=dtype) + 10 * rank


def _expect(value: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(value.cpu(), expected.cpu()), f"got {value.tolist()}, expected {expected.tolist()}"


def all_reduce(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    value = _row(device, dtype, rank)
    dist.all_reduce(value)
    _expect(value, sum((_row(device, dtype, r) for r in range(1, world)), _row(device, dtype, 0)))
    value = _row(device, dtype, rank)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    _expect(value, _row(device, dtype, world - 1))


def asynchronous_all_reduce(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    values = [_row(device, dtype, rank) for _ in range(4)]
    handles = [dist.all_reduce(value, async_op=True) for value in values]
    for handle in handles:
        handle.wait()
    total = sum((_row(device, dtype, r) for r in range(1, world)), _row(device, dtype, 0))
    for value in values:
        _expect(value, total)


def broadcast(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    value = _row(device, dtype, rank)
    dist.broadcast(value, src=world - 1)
    _expect(value, _row(device, dtype, world - 1))


def reduce(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    value = _row(device, dtype, rank)
    dist.reduce(value, dst=0)
    if rank == 0:
        _expect(value, sum((_row(device, dtype, r) for r in range(1, world)), _row(device, dtype, 0)))


def all_gather(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    parts = [torch.empty(4, device=device, dtype=dtype) for _ in range(world)]
    dist.all_gather(parts, _row(device, dtype, rank))
    for r, part in enumerate(parts):
        _expect(part, _row(device, dtype, r))


def all_gather_into_tensor(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    whole = torch.empty(4 * world, device=device, dtype=dtype)
    dist.all_gather_into_tensor(whole, _row(device, dtype, rank))
    _expect(whole, torch.cat([_row(device, dtype, r) for r in range(world)]))


def uneven_all_gather(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    parts = [torch.empty(r + 1, device=device, dtype=dtype) for r in range(world)]
    dist.all_gather(parts, _row(device, dtype, rank, rank + 1))
    for r, part in enumerate(parts):
        _expect(part, _row(device, dtype, r, r + 1))


def reduce_scatter_tensor(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    part = torch.empty(4, device=device, dtype=dtype)
    dist.reduce_scatter_tensor(part, torch.cat([_row(device, dtype, r) for r in range(world)]) + rank)
    _expect(part, _row(device, dtype, rank) * world + sum(range(world)))


def all_to_all_single(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    received = torch.empty(world, device=device, dtype=dtype)
    dist.all_to_all_single(received, torch.arange(world, device=device, dtype=dtype) + 10 * rank)
    _expect(received, torch.arange(world, device=device, dtype=dtype) * 10 + rank)


def uneven_all_to_all_single(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    """Rank r sends r + 1 copies of its number to rank 0 and one to each other: what expert routing does."""
    sizes = [rank + 1] + [1] * (world - 1)
    sent = torch.full((sum(sizes),), rank, device=device, dtype=dtype)
    incoming = [r + 1 for r in range(world)] if rank == 0 else [1] * world
    received = torch.empty(sum(incoming), device=device, dtype=dtype)
    dist.all_to_all_single(received, sent, incoming, sizes)
    _expect(received, torch.repeat_interleave(torch.arange(world, dtype=dtype), torch.tensor(incoming)))


def gather_and_scatter(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    parts = [torch.empty(4, device=device, dtype=dtype) for _ in range(world)] if rank == 0 else None
    dist.gather(_row(device, dtype, rank), parts, dst=0)
    received = torch.empty(4, device=device, dtype=dtype)
    dist.scatter(received, parts, src=0)
    _expect(received, _row(device, dtype, rank))


def send_and_receive(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    """Round the ring, batched as pipeline parallelism does it; sizes differ by rank."""
    if world == 1:
        return
    previous, following = (rank - 1) % world, (rank + 1) % world
    received = torch.empty(previous + 1, device=device, dtype=dtype)
    sent = _row(device, dtype, rank, rank + 1)
    operations = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _expect(received, _row(device, dtype, previous, previous + 1))


def empty_tensors(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    """A rank with nothing to send still takes part."""
    sizes = [1] * world if rank == 0 else [0] * world
    received = torch.empty(1, device=device, dtype=dtype)
    dist.all_to_all_single(
        received, torch.full((sum(sizes),), 3, device=device, dtype=dtype), [1] + [0] * (world - 1), sizes
    )
    _expect(received, torch.full((1,), 3, dtype=dtype))


def objects(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:  # noqa: ARG001 - one signature for all
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(world)]
    box: list[object] = [rank]
    dist.broadcast_object_list(box, src=world - 1, device=device)
    assert box == [world - 1]


COLLECTIVES: dict[str, Collective] = {
    program.__name__: program
    for program in (
        all_reduce,
        asynchronous_all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        uneven_all_gather,
        reduce_scatter_tensor,
        all_to_all_single,
        uneven_all_to_all_single,
        gather_and_scatter,
        send_and_receive,
        empty_tensors,
        objects,
    )
}


def run_collective(accelerator: Accelerator, rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    COLLECTIVES[name](accelerator.device(), dtype, rank, world_size)
    accelerator.synchronize()
    barrier(accelerator)


def subgroups(accelerator: Accelerator, rank: int, world_size: int) -> None:
    """One group of a rank each, one of all, a host group beside them; each carries its own sum."""
    alone = [dist.new_group([r]) for r in range(world_size)]
    everyone, host = dist.new_group(), new_host_group()
    value = torch.ones(2, device=accelerator.device())
    dist.all_reduce(value, group=alone[rank])
    dist.all_reduce(value, group=everyone)
    on_host = torch.ones(2)
    dist.all_reduce(on_host, group=host)
    assert value.tolist() == on_host.tolist() == [world_size] * 2
    assert dist.get_backend(host) == "gloo"
    dist.destroy_process_group(everyone)


def updates(accelerator: Accelerator, rank: int, world_size: int, store: dist.Store) -> str:
    """A group on the weight-update backend carries a device tensor, and a host tensor where it has a host part."""
    backend = weight_update_backend(accelerator)
    init_process_group(accelerator, rank=rank, world_size=world_size, store=store, backend=backend)
    try:
        devices = [accelerator.device()]
        if BackendSpec.parse(backend).for_device("cpu") == "gloo":
            devices.append(torch.device("cpu"))
        for device in devices:
            value = torch.full((3,), float(rank), device=device)
            dist.broadcast(value, src=0)
            accelerator.synchronize()
            assert value.tolist() == [0.0] * 3
    finally:
        destroy_process_group()
    return backend


def recreate(
    accelerator: Accelerator, rank: int, world_size: int, store: dist.Store, cycles: int
) -> list[dict[str, int]]:
    """Begin and end the world and a subgroup again and again; sizes of c10d's registries after the first and last."""
    sizes = []
    for cycle in range(cycles):
        init_process_group(accelerator, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=60))
        value = torch.ones(1, device=accelerator.device())
        dist.all_reduce(value, group=dist.new_group())
        assert value.item() == world_size
        barrier(accelerator)
        destroy_process_group()
        if cycle in (1, cycles - 1):
            sizes.append(registry_sizes())
    return sizes


def registry_sizes() -> dict[str, int]:
    """What c10d and the process keep: group tables, threads, open files."""
    world = c10d._world
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    sizes = {table: len(getattr(world, table)) for table in tables}
    sizes["threads"] = threading.active_count()
    if os.path.isdir("/proc/self/fd"):
        sizes["files"] = len(os.listdir("/proc/self/fd"))
        sizes["native_threads"] = len(os.listdir("/proc/self/task"))
    return sizes


def double_by_handle(spec: str, requests: Any, answers: Any) -> None:
    """A process of its own: doubles in place each tensor that comes by handle, until None comes."""
    accelerator = load_accelerator_spec(spec)
    for tensor in iter(requests.get, None):
        tensor.mul_(2)
        accelerator.synchronize()
        del tensor
        answers.put("doubled")
