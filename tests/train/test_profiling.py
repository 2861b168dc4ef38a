"""``--profile``: which steps are recorded, what is left behind, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.backends.cpu import CpuAccelerator
from samples.errors import InputError
from train.config import cli
from train.config.checks import validate
from train.config.profiling import step_range
from train.config.settings import build
from train.profiling import ProfilePlan, Profiler, profile_plan


class WithHistory(CpuAccelerator):
    """The host, with a history of allocations as a device has one; it keeps what it was told."""

    capabilities = replace(CpuAccelerator.capabilities, memory_snapshot=True, oom_observer=True)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def record_memory_history(self, *, enabled: bool) -> None:
        self.told.append(enabled)

    def save_memory_snapshot(self, path: Path) -> None:
        assert self.told[-1:] == [True]
        path.write_bytes(b"allocations")

    def attach_oom_observer(self, observer: Any) -> None:
        self.observer = observer


def config_of(**values: Any) -> Any:
    return build({"num_rollout": 6, "profile": True, **values})


def plan_of(directory: Path, steps: range = range(1, 2), ranks: int = 1) -> ProfilePlan:
    return ProfilePlan(steps, ("rollout", "train"), directory, ranks)


def operators(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"}


@given(st.integers(0, 999_999), st.integers(0, 50))
def test_a_range_names_its_ends(first: int, more: int) -> None:
    assert step_range(f"{first}-{first + more}") == range(first, first + more + 1)
    assert step_range(f" {first} ") == range(first, first + 1)


@given(st.text(max_size=12))
def test_any_text_is_a_range_of_steps_or_none(text: str) -> None:
    steps = step_range(text)
    assert steps is None or len(steps) > 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"profile_steps": "5-3"}, "--profile-steps '5-3': expected a step or a range"),
        ({"profile_steps": ""}, "--profile-steps '': expected a step or a range"),
        ({"profile_steps": "-1"}, "expected a step or a range"),
        ({"profile_steps": "1-"}, "expected a step or a range"),
        ({"profile_steps": "1,2"}, "expected a step or a range"),
        ({"profile_steps": "²"}, "expected a step or a range"),
        ({"profile_steps": "6"}, r"--profile-steps 6: the run makes steps 0 to 5 \(--num-rollout 6\)"),
        ({"profile_steps": "3-9"}, "the run makes steps 0 to 5"),
        ({"profile": False, "profile_steps": "3"}, "--profile-steps 3: nothing is profiled; give --profile too"),
        ({"profile": False, "profile_what": "train"}, "--profile-what train: nothing is profiled"),
        ({"profile_what": "train", "debug_rollout_only": True}, "--debug-rollout-only trains nothing to profile"),
        ({"profile_what": "rollout", "load_debug_rollout_data": "."}, "rollouts are replayed"),
    ],
)
def test_what_cannot_be_profiled_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        validate(config_of(**values))


def test_what_is_not_a_half_of_a_step_is_refused() -> None:
    with pytest.raises(InputError, match="--profile-what evaluation: must be one of all, train, rollout"):
        cli.parse(["--profile", "--profile-what", "evaluation"])


@pytest.mark.parametrize(
    ("steps", "first", "end", "planned"),
    [
        ("2-3", 0, 6, [2, 3]),
        (None, 0, 6, [1]),
        (None, 0, 1, [0]),
        (None, 4, 6, [5]),
        (None, 5, 6, [5]),
        ("4", 4, 6, [4]),
    ],
)
def test_the_plan_is_of_the_steps_that_are_made(
    tmp_path: Path, steps: str | None, first: int, end: int, planned: list[int]
) -> None:
    plan = profile_plan(config_of(profile_steps=steps), tmp_path, first, end)
    assert plan is not None
    assert list(plan.steps) == planned
    assert plan.directory == tmp_path / "profile"


def test_steps_before_those_of_a_resumed_run_or_after_a_recording_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--profile-steps 2-3: this run makes steps 3 to 5"):
        profile_plan(config_of(profile_steps="2-3"), tmp_path, 3, 6)
    with pytest.raises(InputError, match="--profile-steps 2-3: this run makes steps 0 to 2"):
        profile_plan(config_of(profile_steps="2-3"), tmp_path, 0, 3)


def test_only_the_halves_that_there_are_and_that_were_asked_for_are_planned(tmp_path: Path) -> None:
    def halves(**values: Any) -> tuple[str, ...]:
        plan = profile_plan(config_of(**values), tmp_path, 0, 6)
        assert plan is not None
        return plan.halves

    assert halves() == ("rollout", "train")
    assert halves(profile_what="train") == ("train",)
    assert halves(debug_rollout_only=True) == ("rollout",)
    assert halves(load_debug_rollout_data=".") == ("train",)
    assert profile_plan(config_of(profile=False), tmp_path, 0, 6) is None


def test_a_planned_step_leaves_a_trace_of_every_thread_and_the_memory(tmp_path: Path) -> None:
    profiler = Profiler(plan_of(tmp_path), CpuAccelerator(), "train", 3)
    go, gone = threading.Event(), threading.Event()

    def decode() -> None:
        go.wait()
        torch.ones(4, 4).addmm(torch.ones(4, 4), torch.ones(4, 4))
        gone.set()

    thread = threading.Thread(target=decode)
    thread.start()
    with profiler.step(0):
        pass
    assert not list(tmp_path.iterdir())
    with profiler.step(1):
        (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).sum().backward()
        go.set()
        gone.wait()
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000001_train_rank3.memory.json",
        "step_000001_train_rank3.trace.json",
    ]
    assert {"aten::mm", "aten::addmm"} <= operators(tmp_path / "step_000001_train_rank3.trace.json")
    memory = json.loads((tmp_path / "step_000001_train_rank3.memory.json").read_text())
    assert (memory["step"], memory["half"], memory["rank"], memory["device"]) == (1, "train", 3, "cpu")
    assert memory["after"]["allocated"] > 0
    assert memory["before"]["total"] == memory["after"]["total"] > 0


def test_a_history_of_allocations_is_kept_where_the_device_has_one(tmp_path: Path) -> None:
    accelerator = WithHistory()
    profiler = Profiler(plan_of(tmp_path), accelerator, "rollout")
    with profiler.step(1):
        assert accelerator.told == [True]
    assert accelerator.told == [True, False]
    assert (tmp_path / "step_000001_rollout.allocations.pickle").read_bytes() == b"allocations"


def test_a_failed_allocation_in_a_recorded_step_leaves_what_held_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = WithHistory()
    profiler = Profiler(plan_of(tmp_path), accelerator, "train", 0)
    accelerator.observer(0, 10, 20, 5)  # outside a recorded step there is no history to keep
    assert not list(tmp_path.iterdir())

    def fail() -> None:
        with profiler.step(1):
            accelerator.observer(0, 10, 20, 5)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    names = {path.name for path in tmp_path.iterdir()}
    assert "step_000001_train_rank0_out_of_memory.allocations.pickle" in names
    assert "step_000001_train_rank0.trace.json" in names  # also of a step that fails
    assert "device 0 is out of memory: 10 bytes asked for, 5 free of 20" in capsys.readouterr().err


def test_without_a_plan_nothing_is_asked_of_the_accelerator(tmp_path: Path) -> None:
    accelerator = WithHistory()
    for profiler in (
        Profiler(None, accelerator, "train", 0),
        Profiler(ProfilePlan(range(5), ("rollout",), tmp_path, 1), accelerator, "train", 0),
    ):
        with profiler.step(1):
            pass
    assert not accelerator.told
    assert not hasattr(accelerator, "observer")
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_is_said_and_the_step_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file where the directory should be")
    with Profiler(plan_of(tmp_path / "profile"), CpuAccelerator(), "train", 0).step(1):
        done = True
    assert done
    assert "could not be written" in capsys.readouterr().err


def test_the_last_lines_say_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, range(2, 4))
    (tmp_path / "step_000002_rollout.trace.json").touch()
    (tmp_path / "step_000002_train_rank0.trace.json").touch()
    written, missing = plan.summary()
    assert "has step_000002_rollout.trace.json, step_000002_train_rank0.trace.json" in written
    assert "lacks step_000003_rollout, step_000003_train_rank0" in missing
    plan.clear()
    assert not list(tmp_path.iterdir())
    (only_missing,) = plan.summary()
    assert "lacks" in only_missing


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_run_leaves_the_traces_that_its_last_lines_name(tmp_path: Path, launcher: str) -> None:
    run_dir, ranks = tmp_path / "run", 1 if launcher == "inline" else 2
    argv = [sys.executable, "-m", "train", "--accelerator", "cpu", "--launcher", launcher, "--output-dir", str(run_dir)]
    argv += ["--num-rollout", "3", "--eval-interval", "none", "--profile", "--profile-steps", "1-2"]
    argv += ["--actor-num-gpus-per-node", str(ranks), "--profile-what", "train" if launcher == "ray" else "all"]
    argv += ["--deterministic"] if launcher == "inline" else []
    environ = os.environ | {"ACCELRL_CPU_DEVICES": "2"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    *_, profile, summary = done.stdout.splitlines()
    assert str(run_dir) in summary
    stems = [f"step_00000{step}_train_rank{rank}" for step in (1, 2) for rank in range(ranks)]
    stems += [] if launcher == "ray" else ["step_000001_rollout", "step_000002_rollout"]
    assert profile.startswith(f"profile: {run_dir / 'profile'} has ")
    assert all(f"{stem}.trace.json" in profile for stem in stems)
    files = {path.name for path in (run_dir / "profile").iterdir()}
    assert files == {f"{stem}.{kind}.json" for stem in stems for kind in ("trace", "memory")}
    for stem in stems:  # the engine's products as well as the trainer's
        assert operators(run_dir / "profile" / f"{stem}.trace.json") & {"aten::mm", "aten::addmm", "aten::bmm"}
