"""Every call that a process group offers, made once; each asserts its own result."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from accel.comm import (
    barrier,
)
from accel.contract import Accelerator

TIMEOUT = timedelta(seconds=60)


def collectives(device: torch.device, group: dist.ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    peers = range(size)

    def mine(*shape: int) -> torch.Tensor:
        return torch.full(shape, float(me), device=device)

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0, device=device)

    value = mine(3)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [sum(peers)] * 3
    value = mine(2)
    dist.broadcast(value, group_src=size - 1, group=group)
    assert value.tolist() == [size - 1] * 2
    value = mine(1)
    dist.reduce(value, group_dst=0, op=dist.ReduceOp.MAX, group=group)
    assert me != 0 or value.item() == size - 1
    parts = [empty(2) for _ in peers]
    dist.all_gather(parts, mine(2), group=group)
    assert [part.tolist() for part in parts] == [[float(peer)] * 2 for peer in peers]
    whole = empty(size)
    dist.all_gather_single(whole, mine(1), group=group)
    assert whole.tolist() == list(peers)
    gathered = [empty(1) for _ in peers] if me == 0 else None
    dist.gather(mine(1), gathered, group_dst=0, group=group)
    assert gathered is None or [part.item() for part in gathered] == list(peers)
    part = empty(1)
    rows = [torch.full((1,), 10.0 * peer, device=device) for peer in peers] if me == 0 else None
    dist.scatter(part, rows, group_src=0, group=group)
    assert part.item() == 10.0 * me
    part = empty(1)
    dist.reduce_scatter(part, [torch.full((1,), float(peer), device=device) for peer in peers], group=group)
    assert part.item() == me * size
    part = empty(1)
    dist.reduce_scatter_single(part, torch.arange(float(size), device=device), group=group)
    assert part.item() == me * size
    received = [empty(1) for _ in peers]
    dist.all_to_all(received, [torch.full((1,), 10.0 * me + peer, device=device) for peer in peers], group=group)
    assert [part.item() for part in received] == [10.0 * peer + me for peer in peers]
    whole = empty(size)
    dist.all_to_all_single(whole, 10.0 * me + torch.arange(float(size), device=device), group=group)
    assert whole.tolist() == [10.0 * peer + me for peer in peers]
    dist.barrier(group=group)


def messages(device: torch.device, group: dist.ProcessGroup) -> None:
    """In a ring, both directions: blocking, with handles, and as one batch in which every rank sends first."""
    me, size = group.rank(), group.size()
    following, preceding = (me + 1) % size, (me - 1) % size
    value, other = torch.full((4,), float(me), device=device), torch.empty(4, device=device)
    if me == 0:
        dist.send(value, group_dst=following, group=group)
        dist.recv(other, group_src=preceding, group=group)
    else:
        dist.recv(other, group_src=preceding, group=group)
        dist.send(value, group_dst=following, group=group)
    assert other.tolist() == [preceding] * 4
    works = [
        dist.isend(value, group_dst=following, group=group),
        dist.irecv(other, group_src=preceding, group=group),
    ]
    for work in works:
        work.wait()
    assert other.tolist() == [preceding] * 4
    up, down = torch.empty(4, device=device), torch.empty(4, device=device)
    batch = [
        dist.P2POp(dist.isend, value, group=group, group_peer=following, tag=1),
        dist.P2POp(dist.isend, value + 0.5, group=group, group_peer=preceding, tag=2),
        dist.P2POp(dist.irecv, up, group=group, group_peer=preceding, tag=1),
        dist.P2POp(dist.irecv, down, group=group, group_peer=following, tag=2),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (up[0].item(), down[0].item()) == (preceding, following + 0.5)


def objects(group: dist.ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, {"rank": me}, group=group)
    assert answers == [{"rank": peer} for peer in range(size)]
    told = ["told" if me == 0 else None]
    dist.broadcast_object_list(told, group_src=0, group=group)
    assert told == ["told"]


def functional_calls(device: torch.device, group: dist.ProcessGroup) -> None:
    """These come from C++, by the group's name."""
    me, size = group.rank(), group.size()
    value = torch.full((size,), float(me), device=device)
    assert functional.all_reduce(value, "sum", group).tolist() == [sum(range(size))] * size
    assert functional.all_gather_single(value[:1], 0, group).tolist() == list(range(size))
    assert functional.reduce_scatter_single(value, "sum", 0, group).tolist() == [sum(range(size))]
    assert functional.all_to_all_single(value, None, None, group).tolist() == list(range(size))
    assert functional.broadcast(value, size - 1, group)[0].item() == size - 1
    both = functional.all_reduce_coalesced([value, value + 1], "sum", group)
    assert [part[0].item() for part in both] == [sum(range(size)), sum(range(size)) + size]


def handles(device: torch.device, group: dist.ProcessGroup) -> None:
    size = group.size()
    value = torch.ones(2, device=device)
    work = dist.all_reduce(value, group=group, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait(TIMEOUT)
    assert work.is_completed()
    assert value.tolist() == [size] * 2
    assert doubled.wait().tolist() == [2 * size] * 2


def coalesced(device: torch.device, group: dist.ProcessGroup) -> None:
    size = group.size()
    values = [torch.full((2,), float(number), device=device) for number in range(3)]
    with dist._coalescing_manager(group=group):
        for value in values:
            dist.all_reduce(value, group=group)
    assert [value.tolist() for value in values] == [[float(number * size)] * 2 for number in range(3)]
    wholes = [torch.empty(size, device=device) for _ in range(2)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for whole in wholes:
            dist.all_gather_single(whole, torch.full((1,), float(group.rank()), device=device), group=group)
    manager.wait()
    assert all(whole.tolist() == list(range(size)) for whole in wholes)


def every_call(accelerator: Accelerator, group: dist.ProcessGroup) -> None:
    device = accelerator.device()
    for calls in (collectives, messages, functional_calls, handles, coalesced):
        calls(device, group)
    objects(group)
    barrier(accelerator, group)


# Programs.
