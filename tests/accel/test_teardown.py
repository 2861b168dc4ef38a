"""Communication ends in one order, after an error too: no rank hangs, and nothing stays behind."""

import pytest

from accel.backends.cpu import CpuAccelerator
from accel.comm import teardown
from accel.comm.teardown import end_communication
from accel.conformance.ranks import RankPool
from tests.accel import teardown_programs

CPU = CpuAccelerator()


class Noting(CpuAccelerator):
    def __init__(self, events):
        self.events = events

    def synchronize(self, index=None):
        self.events.append("device synchronised")

    def empty_cache(self):
        self.events.append("device emptied")


@pytest.fixture
def events(monkeypatch):
    noted = []
    monkeypatch.setattr(teardown, "destroy_process_group", lambda: noted.append("world"))
    monkeypatch.setattr(teardown, "_abort_groups", lambda: noted.append("aborted"))
    return noted


def noting(events, what, error=None):
    def close():
        events.append(what)
        if error is not None:
            raise error

    return close


def test_the_order_of_an_end(events):
    updates = [noting(events, "update group 0"), noting(events, "update group 1")]
    end_communication(Noting(events), update_groups=updates, training_groups=noting(events, "training groups"))
    update, device = ["update group 0", "update group 1"], ["device synchronised", "device emptied"]
    assert events == [*update, "training groups", "world", *device]


def test_after_an_error_groups_are_aborted_and_the_device_is_left_alone(events):
    end_communication(
        Noting(events),
        update_groups=[noting(events, "update group")],
        training_groups=noting(events, "training groups"),
        failed=True,
    )
    assert events == ["update group", "aborted", "training groups", "world"]


def test_a_step_that_fails_stops_none_after_it(events):
    failure = ValueError("an engine has gone")
    with pytest.raises(ValueError, match="an engine has gone") as caught:
        end_communication(Noting(events), update_groups=[noting(events, "update group", failure)])
    assert caught.value is failure
    assert events == ["update group", "world", "device synchronised", "device emptied"]
    with pytest.raises(ExceptionGroup) as several:
        end_communication(Noting(events), update_groups=[noting(events, "", failure), noting(events, "", KeyError(1))])
    assert len(several.value.exceptions) == 2


def test_where_nothing_began_nothing_is_to_end():
    end_communication(CPU)
    end_communication(CPU, failed=True)


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(CPU, 2, timeout=120)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("reloadable", [False, True])
def test_nothing_is_left_of_groups_that_ended(pair, reloadable):
    for seen in pair.run(teardown_programs.begin_and_end, reloadable, group=False):
        assert seen[1:] == seen[1:2] * 5  # the first takes what torch keeps for good


@pytest.mark.slow
@pytest.mark.parametrize("reloadable", [False, True])
def test_a_rank_that_fails_ends_the_wait_of_the_others(pair, reloadable):
    """Within the test's time limit, and far below the groups' own of ten minutes."""
    waited, failed = pair.run(teardown_programs.one_fails, reloadable, group=False)
    assert (waited[0], failed[0]) == ("RuntimeError", "MemoryError")
    assert not waited[2]
    assert not failed[2]
