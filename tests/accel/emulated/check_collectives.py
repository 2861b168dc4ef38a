"""Run by test_emulation.py in a process of its own: mccl on two ranks, beyond what conformance asks of a backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel import select_accelerator
from accel.conformance import programs
from accel.conformance.ranks import RankPool
from tests.accel.emulated import rank_programs

accelerator = select_accelerator("musa", emulate=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(accelerator, 2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "program", ["averages", "coalesced", "lists", "futures", "functional_and_mesh", "sharded_training"]
)
def test_program(ranks, program):
    ranks.run(getattr(rank_programs, program))


def test_weight_update_groups_carry_tensors_of_both(ranks):
    assert ranks.run(programs.updates, group=False) == ["cpu:gloo,musa:mccl"] * 2


def test_a_device_only_group_refuses_host_tensors(ranks):
    ranks.run(rank_programs.host_tensors_are_refused)


def test_a_mixed_group_serves_both(ranks):
    for host, device, config in ranks.run(rank_programs.mixed_group, group=False):
        assert (host, device) == ("gloo", "mccl")
        assert config == "cpu:gloo,musa:mccl"
