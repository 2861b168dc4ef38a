"""What the overlapped rollout modes take, and what is refused by name."""

from __future__ import annotations

import re

import pytest

from accel.backends.cpu import CpuAccelerator
from samples.errors import InputError
from train.config.cli import parse
from train.config.run import RunConfig
from train.prepare import resolve_threads


@pytest.mark.parametrize("launcher", ["ray", "inline"])
@pytest.mark.parametrize("mode", ["sync", "one-step-off", "fully-async"])
def test_every_mode_runs_with_every_launcher(mode: str, launcher: str) -> None:
    assert parse(["--rollout-mode", mode, "--launcher", launcher]).rollout.rollout_mode == mode


@pytest.mark.parametrize("mode", ["sync", "one-step-off"])
@pytest.mark.parametrize(
    "flags",
    [
        ("--max-weight-staleness", "3"),
        ("--max-groups-in-flight", "8"),
        ("--max-group-retries", "0"),
    ],
)
def test_flags_of_the_fully_async_mode_are_refused_elsewhere(mode: str, flags: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=rf"{flags[0]} {flags[1]}: --rollout-mode {mode} has no use for it"):
        parse(["--rollout-mode", mode, *flags])


@pytest.mark.parametrize("mode", ["sync", "one-step-off"])
def test_there_is_nothing_to_pause_where_nothing_is_generated_during_an_update(mode: str) -> None:
    for how in ("abort", "retract", "in_place"):
        said = f"--pause-generation-mode {how}: --rollout-mode {mode} generates nothing while weights are updated"
        with pytest.raises(InputError, match=said):
            parse(["--rollout-mode", mode, "--pause-generation-mode", how])
    assert parse(["--rollout-mode", mode, "--pause-generation-mode", "auto"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--over-sampling-batch-size", "64"), "size 64: --rollout-mode fully-async draws no rounds"),
        (("--max-groups-in-flight", "65"), "-flight 65 is more than --max-weight-staleness 1 ever allows, 64"),
        (("--max-weight-staleness", "-1"), "--max-weight-staleness -1: must be a whole number >= 0"),
        (("--partial-rollout", "--pause-generation-mode", "retract"), "retract aborts no response"),
        (("--partial-rollout", "--pause-generation-mode", "in_place"), "in_place aborts no response"),
        (
            ("--pause-generation-mode", "in_place", "--max-weight-staleness", "0"),
            "in_place: with --max-weight-staleness 0 nothing is generated while weights are updated",
        ),
        (("--pause-generation-mode", "drop"), "drop: must be one of auto, abort, retract, in_place"),
    ],
)  # fmt: skip
def test_what_the_fully_async_mode_cannot_do_is_refused(flags: tuple[str, ...], said: str) -> None:
    given = ("--dynamic-sampling-filter-path", "filters.check_reward_nonzero_std", *flags)
    with pytest.raises(InputError, match=re.escape(said)):
        parse(["--rollout-mode", "fully-async", *given])


def test_names_from_elsewhere_say_ours() -> None:
    with pytest.raises(InputError, match=r"use one-step-off, as slime's train_async\.py does, or fully-async"):
        parse(["--rollout-mode", "async"])


def test_roles_that_work_at_once_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    job = resolve_threads(parse(["--rollout-mode", "fully-async"]), CpuAccelerator()).job
    assert (job.trainer_threads, job.rollout_threads) == (4, 4)
    job = resolve_threads(RunConfig(), CpuAccelerator()).job
    assert (job.trainer_threads, job.rollout_threads) == (8, 8)
