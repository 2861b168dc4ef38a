"""What rank processes run for check_collectives.py: each asserts its own part, beyond what conformance asks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from accel.comm import destroy_process_group, init_process_group
from accel.contract import Accelerator


def averages(accelerator: Accelerator, rank: int, world: int) -> None:
    device = accelerator.device()
    mean = torch.full((4,), float(rank + 1), device=device, dtype=torch.bfloat16)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [1.5] * 4
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device=device) + rank, op=dist.ReduceOp.AVG)
    assert part.tolist() == [2.0 * rank + 0.5, 2.0 * rank + 1.5]
    on_root = torch.full((1,), float(rank), device=device)
    dist.reduce(on_root, 0, op=dist.ReduceOp.AVG)
    assert rank != 0 or on_root.item() == 0.5


def coalesced(accelerator: Accelerator, rank: int, world: int) -> None:
    values = [torch.full((2,), float(rank + index), device=accelerator.device()) for index in range(3)]
    with dist._coalescing_manager(device=accelerator.device()):
        for value in values:
            dist.all_reduce(value)
    assert [value.tolist() for value in values] == [[1.0 + 2 * index] * 2 for index in range(3)]
    outputs = [torch.empty(4, device=accelerator.device()) for _ in range(2)]
    with dist._coalescing_manager(device=accelerator.device(), async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((2,), float(rank), device=accelerator.device()))
    manager.wait()
    assert all(output.tolist() == [0, 0, 1, 1] for output in outputs)


def lists(accelerator: Accelerator, rank: int, world: int) -> None:
    device = accelerator.device()
    received = [torch.empty(1, 2, device=device) for _ in range(world)]
    dist.all_to_all(received, [torch.full((1, 2), 10.0 * rank + peer, device=device) for peer in range(world)])
    assert [part.flatten().tolist() for part in received] == [[10.0 * peer + rank] * 2 for peer in range(world)]
    part = torch.empty(2, device=device)
    dist.reduce_scatter(part, [torch.full((2,), float(index), device=device) for index in range(world)])
    assert part.tolist() == [float(rank) * world] * 2


def futures(accelerator: Accelerator, rank: int, world: int) -> None:
    work = dist.all_reduce(torch.ones(2, device=accelerator.device()), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [4, 4]
    assert doubled.wait().device == accelerator.device()


def functional_and_mesh(accelerator: Accelerator, rank: int, world: int) -> None:
    device = accelerator.device()
    assert functional.all_reduce(torch.ones(2, device=device), "sum", dist.group.WORLD).tolist() == [2, 2]
    mesh = init_device_mesh("musa", (world,), mesh_dim_names=("dp",))
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=mesh.get_group("dp"))
    assert value.item() == world


def sharded_training(accelerator: Accelerator, rank: int, world: int) -> None:
    """DDP and FSDP2 against one process that sees the whole batch."""
    from torch.distributed.fsdp import fully_shard

    device = accelerator.device()
    inputs = torch.arange(8.0, device=device).view(2, 4)

    def trained(wrap, batch):
        torch.manual_seed(0)
        plain = torch.nn.Linear(4, 4)
        model = wrap(plain.to(device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        weight = next(model.parameters()).detach()
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    expected = trained(lambda model: model, inputs)
    mine = inputs[rank : rank + 1]
    ddp = trained(lambda model: torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]), mine)
    fsdp = trained(lambda model: fully_shard(model, mesh=init_device_mesh("musa", (world,))), mine)
    torch.testing.assert_close(ddp, expected)
    torch.testing.assert_close(fsdp, expected)


def host_tensors_are_refused(accelerator: Accelerator, rank: int, world: int) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"cpu|No backend"):
        dist.all_reduce(torch.ones(1))


def mixed_group(accelerator: Accelerator, rank: int, world: int, store: dist.Store) -> list[str]:
    init_process_group(accelerator, rank=rank, world_size=world, store=store, backend="cpu:gloo,musa:mccl")
    try:
        for device in (torch.device("cpu"), accelerator.device()):
            value = torch.ones(2, device=device)
            dist.all_reduce(value)
            assert value.tolist() == [world] * 2
        group = dist.group.WORLD
        return [
            group._get_backend(torch.device("cpu")).name(),
            group._get_backend(accelerator.device()).name(),
            str(dist.get_backend_config()),
        ]
    finally:
        destroy_process_group()
