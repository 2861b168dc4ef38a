"""Addresses, arguments and time limits of process groups. Collectives on real ranks are in the conformance suite."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.comm import barrier, destroy_process_group, init_process_group, new_host_group, tcp_address
from accel.comm.process_groups import _is_local
from accel.conformance.ranks import RankFailure, RankPool

CPU = CpuAccelerator()


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("10.0.0.1", 29500, "tcp://10.0.0.1:29500"),
        ("node-1", 1, "tcp://node-1:1"),
        pytest.param("fe80::1", 29500, "tcp://[fe80::1]:29500", id="slime 2199, slime 2151: IPv6 without brackets"),
        ("[::1]", 29500, "tcp://[::1]:29500"),
    ],
)
def test_addresses(host, port, address):
    assert tcp_address(host, port) == address


@pytest.mark.parametrize(("host", "port"), [("", 1), ("[]", 1), ("h", 0), ("h", 65536)])
def test_addresses_that_cannot_be(host, port):
    with pytest.raises(AcceleratorError):
        tcp_address(host, port)


@pytest.mark.parametrize(
    ("init_method", "local"),
    [
        ("file:///tmp/store", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://node-1:1", False),
    ],
)
def test_one_machine_is_recognised_by_its_address(init_method, local):
    assert _is_local(None, init_method) is local


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0, "world_size": 1}, "a store or an init_method"),
        ({"rank": 0, "world_size": 1, "store": dist.HashStore(), "init_method": "env://"}, "not both"),
        ({"rank": 2, "world_size": 2, "store": dist.HashStore()}, "ranks are 0 to 1"),
        ({"rank": 0, "world_size": 1, "store": dist.HashStore(), "timeout": timedelta(0)}, "positive"),
        ({"rank": 0, "world_size": 1, "store": dist.HashStore(), "backend": "xnccl"}, "unknown backend"),
    ],
)
def test_arguments_that_cannot_be(arguments, says):
    with pytest.raises(AcceleratorError, match=says):
        init_process_group(CPU, **arguments)


def test_a_world_of_one_begins_and_ends_and_begins_again():
    for _ in range(2):
        init_process_group(CPU, rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=30))
        try:
            with pytest.raises(AcceleratorError, match="initialised already"):
                init_process_group(CPU, rank=0, world_size=1, store=dist.HashStore())
            value = torch.ones(1)
            dist.all_reduce(value, group=new_host_group())
            barrier(CPU)
            assert value.item() == 1
        finally:
            destroy_process_group()
    destroy_process_group()


def wait_alone(accelerator, rank, world_size, store):
    if rank == 0:
        return "left"
    init_process_group(accelerator, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=2))
    return "joined"


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_wait_at_the_time_limit():
    pool = RankPool(CPU, 2, timeout=60)
    try:
        with pytest.raises(RankFailure, match=r"rank 1:(.|\n)*(timed out|timeout|Timeout)"):
            pool.run(wait_alone, group=False)
    finally:
        pool.close()
