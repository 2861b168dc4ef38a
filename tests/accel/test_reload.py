"""Process groups that give their communicators back and get new ones. Ranks are real processes."""

import pytest
import torch.distributed as dist

from accel.backends.cpu import CpuAccelerator
from accel.comm import inner_backend, is_accelerator_backend, register_reloadable_backend
from accel.comm.reloadable_group import OWN, ReloadableProcessGroup
from accel.conformance.ranks import RankPool
from tests.accel import reload_programs

CPU = CpuAccelerator()
MEGABYTE = 1 << 20


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    pool = RankPool(CPU, request.param, timeout=120)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(CPU, 2, timeout=120)
    yield pool
    pool.close()


def test_every_method_of_a_process_group_is_answered_or_passed_on():
    """Also one that a newer torch has: whatever it is, it must not reach the empty group outside."""
    ours = vars(ReloadableProcessGroup)
    for name, attribute in vars(dist.ProcessGroup).items():
        if name.startswith("__") or name in OWN:
            continue
        if callable(attribute) and not isinstance(attribute, type):
            assert callable(ours[name]), name
        elif isinstance(attribute, property):
            assert isinstance(ours[name], property), name


def test_the_name_of_a_reloadable_backend_says_what_is_inside():
    name = register_reloadable_backend(CPU)
    assert name == register_reloadable_backend(CPU, "gloo") == "reloadable_gloo"
    assert inner_backend(name) == "gloo"
    assert inner_backend("cpu:gloo") == "cpu:gloo"
    assert is_accelerator_backend(name, CPU)
    assert dist.Backend.backend_capability[name] == ["cpu"]


@pytest.mark.slow
def test_every_call_works_before_and_after_a_reload_and_everyone_keeps_the_same_group(ranks):
    for names in ranks.run(reload_programs.every_call_before_and_after, group=False):
        assert set(names) == {"ReloadableProcessGroup", "False"}


@pytest.mark.slow
def test_a_released_group_says_so_and_keeps_its_facts(pair):
    for says in pair.run(reload_programs.released_groups_say_so, group=False):
        assert len(says) == 3
        assert all("process group 0 is released: call reload_process_groups()" in text for text in says)


@pytest.mark.slow
def test_a_rebuilt_group_has_exactly_its_own_arguments(pair):
    """slime 2095: its time limit, also one that was set later, and its options."""
    assert pair.run(reload_programs.arguments_are_kept, group=False) == [[0, 1]] * 2


@pytest.mark.slow
def test_overlapping_groups_are_rebuilt_without_waiting_in_a_circle(ranks):
    counts = ranks.run(reload_programs.overlapping, group=False)
    assert counts == ([3, 3] if len(counts) == 2 else [6] * 4)


@pytest.mark.slow
def test_no_rank_runs_ahead_of_a_slow_one(pair, tmp_path):
    pair.run(reload_programs.a_slow_rank, str(tmp_path), group=False)


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named_at_the_time_limit(pair):
    says, away = pair.run(reload_programs.a_missing_rank, group=False)
    assert away == "stays away"
    assert "Ranks 1 failed to pass" in says


@pytest.mark.slow
def test_fifty_cycles_leave_nothing_behind(ranks):
    for before, released, after, _ in ranks.run(reload_programs.fifty_cycles, group=False):
        grown = after.pop("resident") - before.pop("resident")
        assert after == before
        assert grown < 2 * MEGABYTE, f"{grown} bytes"
        assert before["groups"] == 3  # world, the other one, and the host group on which ranks meet
        assert released["threads"] < before["threads"]
        assert released["descriptors"] < before["descriptors"]


@pytest.mark.slow
def test_a_store_in_a_file_does_not_grow_with_the_cycles(pair, tmp_path):
    for early, late, files in pair.run(reload_programs.store_files, str(tmp_path / "store"), group=False):
        assert late <= early * 1.5, f"{early} bytes, then {late}"
        assert files == 1, "while released there is the store itself"
    assert [path.name for path in tmp_path.iterdir()] in ([], ["store"])


@pytest.mark.slow
def test_ddp_and_device_meshes_use_the_new_communicators(pair):
    pair.run(reload_programs.users_of_groups, group=False)


@pytest.mark.slow
def test_what_cannot_be_is_refused_by_name(pair):
    says = pair.run(reload_programs.refused, group=False)[0]
    assert len(says) == 4
    assert "init_process_group(…, reloadable=True)" in says[0]
    assert says[0] == says[1]
    assert "cannot be split" in says[2]
    assert "cannot be renamed to other" in says[3]
