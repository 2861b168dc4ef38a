"""Who gives memory back before who takes it, what is said of it, and what cannot take turns at all."""

from __future__ import annotations

import pytest

from accel.contract import MemoryInfo
from accel.memory.waiting import MemoryNotFreed
from samples.errors import InputError, RunError
from tests.train.trainer_cases import run_config
from train.checkpoint.errors import CheckpointWriteError
from train.config.checks.everything import validate
from train.config.cli import parse
from train.turns import TRAINER, WEIGHTS, Turns

GIB = 1 << 30


class Recorded:
    """Both sides; writes down what is asked of them. ``stuck``: the call that finds no memory."""

    def __init__(self, stuck: tuple[str, str] | None = None) -> None:
        self.calls: list[str] = []
        self.stuck = stuck

    def trainers(self, call, *arguments):
        if call == "memory":
            return [MemoryInfo(free=2 * GIB, total=9 * GIB, allocated=rank * GIB) for rank in (3, 4)]
        return [self._called("trainer", call, *arguments)]

    def rollout(self, call, *arguments):
        if call == "memory":
            return MemoryInfo(free=2 * GIB, total=9 * GIB, allocated=5 * GIB)
        return self._called("rollout", call, *arguments)

    def _called(self, side, call, *arguments):
        if self.stuck == (side, call):
            raise MemoryNotFreed(f"the {side} gave 5.00 GiB back")
        self.calls.append(" ".join([side, call.removesuffix("_memory"), *(",".join(tags) for tags in arguments)]))


def turns(sides, tmp_path, **offload) -> Turns:
    return Turns(run_config(tmp_path, offload=offload), sides)


def step(taken: Turns) -> None:
    taken.to_trainer()
    taken.to_update()
    taken.to_rollout()


def test_what_one_side_takes_the_other_gave_back_before(tmp_path):
    sides = Recorded()
    taken = turns(sides, tmp_path, colocate=True)
    step(taken)
    assert sides.calls == [
        "rollout release weights,kv_cache,graphs",
        "trainer resume weights,optimizer",
        "trainer release optimizer",
        "rollout resume weights",
        "trainer rest",
        "rollout rest",
        "trainer release weights",
        "rollout resume kv_cache,graphs",
    ]
    metrics = taken.metrics()
    assert metrics.pop("perf/offload_time") > 0
    assert metrics == {
        f"memory/{side}/{turn}": figure * GIB
        for side, figure in (("trainer", 4), ("rollout", 5))
        for turn in ("generating", "training", "updating")
    }


def test_a_start_and_a_save_take_turns_too(tmp_path):
    sides = Recorded()
    taken = turns(sides, tmp_path, offload=True)
    taken.before_engine()
    taken.before_first_update()
    taken.to_rollout()
    assert sides.calls == [
        "trainer release weights,optimizer",
        "rollout release kv_cache,graphs",
        "trainer resume weights",
        "trainer rest",
        "rollout rest",
        "trainer release weights",
        "rollout resume kv_cache,graphs",
    ]
    around = [
        "rollout release kv_cache,graphs",
        "trainer resume weights,optimizer",
        "trainer release weights,optimizer",
        "rollout resume kv_cache,graphs",
    ]
    for error in (None, CheckpointWriteError("full")):
        sides.calls.clear()
        try:
            with taken.trainer_in_between(TRAINER):
                if error is not None:
                    raise error
        except CheckpointWriteError:
            pass
        assert sides.calls == around


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ({"colocate": True, "offload_train": False}, {"rollout release", "rollout resume"}),
        ({"offload_train": True}, {"trainer release", "trainer resume"}),
        ({"colocate": True, "offload_train": False, "offload_rollout": False}, set()),
    ],
)
def test_one_side_alone_may_give_its_memory_back(offload, said, tmp_path):
    sides = Recorded()
    taken = turns(sides, tmp_path, **offload)
    step(taken)
    with taken.trainer_in_between(WEIGHTS):
        pass
    found = {" ".join(call.split()[:2]) for call in sides.calls}
    assert found - {"trainer rest", "rollout rest"} == said


def test_without_turns_nothing_is_asked_of_anybody(tmp_path):
    sides = Recorded()
    taken = turns(sides, tmp_path)
    taken.before_engine()
    taken.before_first_update()
    step(taken)
    assert sides.calls == []
    assert taken.metrics() == {}


def test_memory_that_is_not_free_in_time_is_an_error_with_both_sides_figures(tmp_path):
    """slime 579: released is what is free, and the wait has an end."""
    with pytest.raises(RunError) as caught:
        step(turns(Recorded(stuck=("rollout", "release_memory")), tmp_path, colocate=True))
    message = str(caught.value)
    assert message.startswith("the rollout gave 5.00 GiB back. What both sides say: ")
    for figures in ("trainer rank 0: 3.00 GiB allocated", "trainer rank 1: 4.00", "rollout: 5.00", "2.00 GiB free"):
        assert figures in message


REFUSED = [
    ("--colocate --rollout-mode one-step-off", "--colocate with --rollout-mode one-step-off"),
    ("--offload --rollout-mode fully-async", "--offload with --rollout-mode fully-async"),
    ("--offload-rollout --rollout-mode fully-async", "--offload-rollout with --rollout-mode fully-async"),
    ("--offload --weight-update-channel disk_delta", "disk_delta"),
    ("--colocate --release-train", "--no-offload-train"),
    ("--colocate --weight-update-channel distributed", "distributed with --colocate"),
    ("--colocate --rollout-num-gpus 2", "--rollout-num-gpus 2 with --colocate"),
    ("--colocate --offload-dir /nowhere/at/all", "--offload-dir /nowhere/at/all: no such directory"),
    ("--colocate --debug-rollout-only", "nothing is trained, so nobody waits"),
    ("--check-offload-equal", "the trainer keeps its memory"),
    ("--offload-rollout --offload-dir /tmp", "the trainer keeps its memory"),
    ("--offload-timeout 3", "nobody gives memory back"),
    ("--no-offload-train", "it is off without --offload"),
    ("--no-offload-rollout", "it is off without --offload"),
    (
        "--offload --rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:1 --sglang-router-ip none",
        "keep their memory",
    ),
    ("--colocate --rollout-engine sglang --rollout-num-gpus-per-engine 2", "do not hold whole engines"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_cannot_take_turns_is_refused_by_name(flags, said):
    with pytest.raises(InputError) as caught:
        parse(["--accelerator", "cpu", *flags.split()], {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "offload",
    [{"colocate": True}, {"offload": True}, {"colocate": True, "offload_train": False}, {"offload_rollout": True}],
)
def test_what_can_take_turns_is_taken(offload, tmp_path):
    from tests.train.trainer_cases import write_model

    config = run_config(
        write_model(tmp_path / "model"),
        offload=offload,
        data={"prompt_data": (str(tmp_path),)},
        reward={"rm_type": "exact_match"},
    )
    with pytest.raises(InputError) as caught:  # of a directory for prompts, and of nothing else
        validate(config, None)
    assert "offload" not in str(caught.value)
    assert "colocate" not in str(caught.value)
