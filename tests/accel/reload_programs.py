"""What rank processes run for the tests of reloadable groups, on any accelerator. Each asserts its own part."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from accel import AcceleratorError
from accel.comm import (
    destroy_process_group,
    init_process_group,
    new_host_group,
    register_reloadable_backend,
    release_process_groups,
    reload_process_groups,
    reloadable_groups,
)
from accel.contract import Accelerator
from tests.accel.collective_calls import (
    TIMEOUT,
    collectives,
    every_call,
    objects,
)


def begin(accelerator: Accelerator, rank: int, world: int, store: dist.Store, **named: Any) -> None:
    settings = {"timeout": TIMEOUT, "reloadable": True} | named
    init_process_group(accelerator, rank=rank, world_size=world, store=store, **settings)


def cycle(accelerator: Accelerator) -> None:
    assert release_process_groups(accelerator) == reload_process_groups(accelerator)


# Every kind of call, on a group of which this rank is member number `me` of `size`.


def every_call_before_and_after(
    accelerator: Accelerator, rank: int, world: int, store: dist.Store, backend: str | None = None
) -> list[str]:
    begin(accelerator, rank, world, store, backend=backend)
    everyone, some, alone = dist.group.WORLD, dist.new_group(list(range(world))[:2]), None
    for peer in range(world):
        group = dist.new_group([peer])
        alone = group if peer == rank else alone
    mine = [everyone, alone] + ([some] if rank < 2 else [])
    for round_ in range(3):
        for group in mine:
            if group.size() > 1:
                every_call(accelerator, group)
            else:
                collectives(accelerator.device(), group)
        if round_ < 2:
            cycle(accelerator)
    assert dist.group.WORLD is everyone
    names = [type(group).__name__ for group in mine]
    destroy_process_group()
    return [*names, str(dist.is_initialized())]


def coalesced_on_the_device(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> None:
    """A section that the backend itself coalesces: collectives, and messages of which every rank sends first."""
    begin(accelerator, rank, world, store)
    group, device = dist.group.WORLD, accelerator.device()
    following, preceding = (rank + 1) % world, (rank - 1) % world
    for _ in range(2):
        values = [torch.full((2,), float(rank), device=device) for _ in range(2)]
        with dist._coalescing_manager(group, device):
            for value in values:
                dist.all_reduce(value)
        assert all(value.tolist() == [sum(range(world))] * 2 for value in values)
        other = torch.empty(2, device=device)
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            dist.isend(torch.full((2,), float(rank), device=device), following)
            dist.irecv(other, preceding)
        manager.wait()
        assert other.tolist() == [preceding] * 2
        cycle(accelerator)
    destroy_process_group()


def released_groups_say_so(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> list[str]:
    begin(accelerator, rank, world, store)
    side = new_host_group()
    assert release_process_groups(accelerator) == ["0"]
    assert release_process_groups(accelerator) == []
    says = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1, device=accelerator.device())),
        lambda: functional.all_reduce(torch.ones(1, device=accelerator.device()), "sum", dist.group.WORLD),
        lambda: dist.group.WORLD._get_backend(accelerator.device()),
    ):
        try:
            call()
        except AcceleratorError as error:
            says.append(str(error))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(world))
    objects(side)
    assert reload_process_groups(accelerator) == ["0"]
    assert reload_process_groups(accelerator) == []
    every_call(accelerator, dist.group.WORLD)
    release_process_groups(accelerator)
    destroy_process_group()
    return says


def arguments_are_kept(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> list[Any]:
    """slime 2095. The extended api and its options, a group's own time limit, and one that was set later."""
    name, made = "noting", []

    def create(described: Any, options: Any) -> Any:
        who = (described.group_id, described.global_ranks_in_group, described.group_rank, described.group_size)
        made.append((who, described.timeout.total_seconds(), options))
        return dist.ProcessGroupGloo(described.store, described.group_rank, described.group_size, described.timeout)

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    begin(accelerator, rank, world, store)
    backend = register_reloadable_backend(accelerator, name)
    options = {"streams": 4}
    dist.new_group(list(range(world)), timeout=timedelta(seconds=47), backend=backend, pg_options=options)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=23), dist.group.WORLD)
    cycle(accelerator)
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert limit == timedelta(seconds=23)
    assert made[0] == made[1]
    assert made[0][2] is options
    assert made[0][1] == 47
    destroy_process_group()
    return list(made[0][0][1])


def overlapping(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> int:
    """Pairs that form circles, and some made by their members alone, whose names are hashes."""
    begin(accelerator, rank, world, store)
    pairs = [(first, second) for first in range(world) for second in range(first + 1, world)]
    mine = []
    for pair in pairs:
        group = dist.new_group(list(pair))
        mine += [group] if rank in pair else []
    # torch hashes how many groups a rank has too, so members must have made equally many before.
    for pair in [(0, 1), (2, 3), (1, 2), (0, 3)] if world == 4 else pairs:
        if rank in pair:
            mine.append(dist.new_group(list(pair), use_local_synchronization=True))
    for _ in range(5):
        cycle(accelerator)
    for group in mine:
        collectives(accelerator.device(), group)
    count = len(reloadable_groups())
    destroy_process_group()
    return count


def a_slow_rank(accelerator: Accelerator, rank: int, world: int, store: dist.Store, folder: str) -> list[str]:
    """The last rank does not come to the release until the others have had time to run ahead."""
    begin(accelerator, rank, world, store)
    mark = Path(folder) / "late"
    if rank == world - 1:
        time.sleep(1.0)
        mark.touch()
    release_process_groups(accelerator)
    assert mark.exists()
    if rank == world - 1:
        time.sleep(1.0)
        mark.with_name("later").touch()
    reload_process_groups(accelerator)
    assert mark.with_name("later").exists()
    every_call(accelerator, dist.group.WORLD)
    destroy_process_group()
    return []


def a_missing_rank(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> str:
    begin(accelerator, rank, world, store)
    try:
        if rank == world - 1:
            time.sleep(5)
            return "stays away"
        release_process_groups(accelerator, timeout=timedelta(seconds=2))
    except RuntimeError as error:
        return str(error)
    finally:
        destroy_process_group()
    return "released"


def what_is_held(accelerator: Accelerator) -> dict[str, int]:
    """``communicators``: bytes of the device that are not free, and that its allocator knows nothing of."""
    gc.collect()
    memory = accelerator.memory_info()
    outside = memory.total - memory.free - (memory.allocated or 0)
    world = dist.distributed_c10d._world
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {
        "groups": len(world.pg_map),
        "names": len(world.pg_names),
        "works": torch._C._distributed_c10d._get_work_registry_size(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": dist.group.WORLD.get_group_store().num_keys(),
        "resident": resident,
        "communicators": outside if accelerator.device_type != "cpu" else 0,  # there all processes share it
    }


def fifty_cycles(
    accelerator: Accelerator, rank: int, world: int, store: dist.Store, backend: str | None = None, cycles: int = 50
) -> tuple[dict[str, int], dict[str, int], dict[str, int], list[int]]:
    """Megatron-LM 6897. What is held after the first cycles, while released, and at the end; bytes in each cycle."""
    begin(accelerator, rank, world, store, backend=backend)
    dist.new_group(list(range(world)))
    allocated = []

    def used() -> None:
        for group in reloadable_groups():
            dist.all_reduce(torch.ones(1024, device=accelerator.device()), group=group)

    for _ in range(5):
        cycle(accelerator)
        used()
    before = what_is_held(accelerator)
    for _ in range(cycles):
        cycle(accelerator)
        used()
        allocated.append(accelerator.memory_info().allocated or 0)
    after = what_is_held(accelerator)
    release_process_groups(accelerator)
    released = what_is_held(accelerator)
    reload_process_groups(accelerator)
    destroy_process_group()
    return before, released, after, allocated


def store_files(accelerator: Accelerator, rank: int, world: int, store: dist.Store, path: str) -> list[int]:
    """Bytes of what lies at ``path`` and beside it: after the first cycles, after more, and at the end."""
    begin(accelerator, rank, world, dist.FileStore(path, world))
    side = new_host_group()
    dist.new_group(list(range(world)))
    sizes = []

    def note() -> None:
        dist.barrier(group=side)
        sizes.append(sum(file.stat().st_size for file in Path(path).parent.iterdir()))
        dist.barrier(group=side)

    for cycles in (3, 20):
        for _ in range(cycles):
            cycle(accelerator)
            for group in reloadable_groups():
                dist.all_reduce(torch.ones(8, device=accelerator.device()), group=group)
        note()
    release_process_groups(accelerator)
    sizes.append(len(list(Path(path).parent.iterdir())))
    reload_process_groups(accelerator)
    destroy_process_group()
    return sizes


def users_of_groups(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> None:
    """What holds groups for long: DDP, a device mesh with a DTensor. Made before a reload, used after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    begin(accelerator, rank, world, store)
    device = accelerator.device()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device))
    inputs = torch.arange(4.0 * world, device=device).view(world, 4)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(inputs[rank : rank + 1]).pow(2).mean().backward()
        return model.module.weight.grad.clone()

    before = gradient()
    sharded = distribute_tensor(inputs, mesh, [Shard(0)])
    cycle(accelerator)
    torch.testing.assert_close(gradient(), before)
    torch.testing.assert_close(sharded.full_tensor(), inputs)
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=mesh.get_group("dp"))
    assert value.item() == world
    destroy_process_group()


def refused(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> list[str]:
    says = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except AcceleratorError as error:
            says.append(str(error))

    note(lambda: release_process_groups(accelerator))
    begin(accelerator, rank, world, store, reloadable=False)
    note(lambda: release_process_groups(accelerator))
    destroy_process_group()
    begin(accelerator, rank, world, store)
    note(lambda: dist.group.WORLD.split_group([0]))
    note(lambda: dist.group.WORLD._set_group_name("other"))
    destroy_process_group()
    return says
