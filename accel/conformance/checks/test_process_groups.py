"""Subgroups, the group that carries weights, and fifty lives of one world."""

from __future__ import annotations

from accel.comm import weight_update_backend
from accel.conformance import programs
from accel.conformance.ranks import RankPool
from accel.contract import Accelerator

CYCLES = 50


def test_subgroups_and_a_host_group(ranks: RankPool) -> None:
    ranks.run(programs.subgroups)


def test_the_weight_update_backend_carries_weights(accelerator: Accelerator, ranks: RankPool) -> None:
    assert set(ranks.run(programs.updates, group=False)) == {weight_update_backend(accelerator)}


def test_fifty_lives_leave_nothing_behind(ranks: RankPool) -> None:
    """Megatron-LM 6897: the registries of groups grew with every life."""
    for early, late in ranks.run(programs.recreate, CYCLES, group=False):
        grown = {name: (early[name], late[name]) for name in early if late[name] > early[name]}
        assert not grown, f"grew between cycle 2 and {CYCLES}: {grown}"
