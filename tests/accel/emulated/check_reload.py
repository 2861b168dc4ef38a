"""Run by test_emulation.py in a process of its own: process groups of the device that are given back and rebuilt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel import select_accelerator
from accel.conformance.ranks import RankPool
from tests.accel import reload_programs, teardown_programs

accelerator = select_accelerator("musa", emulate=True)
MEGABYTE = 1 << 20
COMMUNICATOR = 4 * MEGABYTE  # what the emulated collectives hold on the device


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request) -> Iterator[RankPool]:
    pool = RankPool(accelerator, request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("backend", [None, "cpu:gloo,musa:mccl"])
def test_every_call_works_before_and_after_a_reload(ranks, backend):
    for names in ranks.run(reload_programs.every_call_before_and_after, backend, group=False):
        assert set(names) == {"ReloadableProcessGroup", "False"}


@pytest.mark.parametrize("backend", [None, "cpu:gloo,musa:mccl"])
def test_fifty_cycles_leave_nothing_behind(ranks, backend):
    for before, released, after, allocated in ranks.run(reload_programs.fifty_cycles, backend, group=False):
        grown = after.pop("resident") - before.pop("resident")
        assert after == before
        assert grown < 2 * MEGABYTE, f"{grown} bytes"
        assert max(allocated) <= 2 * 4096  # bytes on the device: a work's own tensor, which its thread may still hold
        assert released["threads"] < before["threads"]
        assert released["descriptors"] < before["descriptors"]
        assert released["communicators"] == 0
        assert before["communicators"] == 2 * COMMUNICATOR  # of the world and the other group; after is the same


def test_overlapping_groups_are_rebuilt(ranks):
    ranks.run(reload_programs.overlapping, group=False)


def test_coalescing_of_the_devices_own_kind(ranks):
    ranks.run(reload_programs.coalesced_on_the_device, group=False)


def test_a_rank_that_fails_ends_the_wait_of_the_others(ranks):
    *waited, failed = ranks.run(teardown_programs.one_fails, True, group=False)
    assert failed[0] == "MemoryError"
    assert all(saw == "RuntimeError" for saw, _, _ in waited)
