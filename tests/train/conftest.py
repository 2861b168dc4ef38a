"""Megatron on the host in this process; the import hook is for the life of a process and meant for cpu in all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel.backends.cpu import CpuAccelerator
from train.config.run import RunConfig


@pytest.fixture(scope="session")
def cpu_megatron() -> CpuAccelerator:
    """Megatron can be imported."""
    from train.megatron.bootstrap import prepare_megatron

    accelerator = CpuAccelerator()
    prepare_megatron(accelerator)
    torch.set_num_threads(1)
    return accelerator


@pytest.fixture(scope="module")
def one_rank(cpu_megatron: CpuAccelerator) -> Iterator[None]:
    """This process is the only rank of a trainer, until the module's last test."""
    from train.megatron.parallel import join_ranks, leave_ranks

    join_ranks(RunConfig(), cpu_megatron, rank=0, world_size=1, store_path=None)
    yield
    leave_ranks(cpu_megatron)
