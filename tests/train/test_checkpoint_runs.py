"""Whole runs that are killed or stopped and go on: what they write is what an uninterrupted run writes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from train.checkpoint.directory import checkpoint_steps
from train.example import write_example
from train.replay.rollout_file import recorded_ids

pytestmark = pytest.mark.slow

ACCELRL = Path(sys.executable).with_name("accelrl")
STEPS = 12


def _argv(run_dir: Path, *flags: str, launcher: str = "inline") -> list[str]:
    settings = ["--accelerator", "cpu", "--launcher", launcher, "--num-rollout", str(STEPS), "--seed", "3"]
    return [str(ACCELRL), "train", *settings, "--eval-interval", "4", "--output-dir", str(run_dir), *flags]


def _run(run_dir: Path, *flags: str, launcher: str = "inline") -> subprocess.CompletedProcess[str]:
    return subprocess.run(_argv(run_dir, *flags, launcher=launcher), capture_output=True, text=True, timeout=400)


def _start(run_dir: Path, *flags: str, launcher: str = "inline") -> subprocess.Popen[str]:
    return subprocess.Popen(
        _argv(run_dir, *flags, launcher=launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    """All that was logged, but for times."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def _wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    path = run_dir / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def _kill_tree(root: int) -> None:
    """SIGKILL for a process and all of its descendants, whatever session they are in."""
    os.kill(root, signal.SIGSTOP)  # nobody new while we look
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    doomed = [root]
    for process in doomed:
        doomed += parents.get(process, [])
    for process in doomed:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = _run(run_dir)
    assert done.returncode == 0, done.stderr
    rows = _rows(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert not (run_dir / "checkpoints").exists()
    return rows


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, flags: tuple[str, ...], uninterrupted: list[dict[str, Any]]
):
    chance = random.Random(len(flags))
    run_dir = tmp_path / "run"
    flags = ("--save-interval", "5", *flags)
    process = _start(run_dir, *flags)
    _wait_for_rows(run_dir, chance.randint(6, STEPS - 1), process)
    time.sleep(chance.uniform(0.0, 0.3))
    _kill_tree(process.pid)
    process.communicate()
    saved = checkpoint_steps(run_dir / "checkpoints")[-1]
    done = _run(run_dir, *flags, "--load", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert f"step_{saved:06d}, after step {saved + 1}" in done.stdout
    assert _rows(run_dir) == uninterrupted
    assert f"after {STEPS} steps" in done.stdout.splitlines()[-1]


def test_a_run_that_goes_on_elsewhere_begins_with_the_step_after_the_saved_one(
    tmp_path: Path, uninterrupted: list[dict[str, Any]]
):
    first = _start(tmp_path / "first", "--save-interval", "5", "--save-keep", "1")
    _wait_for_rows(tmp_path / "first", 7, first)
    _kill_tree(first.pid)
    first.communicate()
    done = _run(
        tmp_path / "second", "--load", str(tmp_path / "first" / "checkpoints"), "--save-hf", str(tmp_path / "hf")
    )
    assert done.returncode == 0, done.stderr
    assert _rows(tmp_path / "second") == uninterrupted[5:]
    assert (tmp_path / "hf" / "model.safetensors").exists()


TWO_RANKS = pytest.param(("--actor-num-gpus-per-node", "2"), marks=pytest.mark.nightly)
IN_BACKGROUND = pytest.param(("--actor-num-gpus-per-node", "2", "--async-save"), marks=pytest.mark.nightly)


@pytest.mark.parametrize("layout", [(), TWO_RANKS, IN_BACKGROUND], ids=["one rank", "two data ranks", "asynchronous"])
def test_a_killed_ray_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "2")
    whole = _run(tmp_path / "whole", *(flag for flag in layout if flag != "--async-save"), launcher="ray")
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "run"
    process = _start(run_dir, "--save-interval", "5", *layout, launcher="ray")
    _wait_for_rows(run_dir, 7, process)
    _kill_tree(process.pid)
    process.communicate()
    done = _run(run_dir, "--save-interval", "5", "--load", "auto", *layout, launcher="ray")
    assert done.returncode == 0, done.stderr
    assert "step_000004, after step 5" in done.stdout
    assert _rows(run_dir) == _rows(tmp_path / "whole")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_its_last_step(tmp_path: Path, sign: signal.Signals, uninterrupted: list[dict[str, Any]]):
    run_dir = tmp_path / "run"
    process = _start(run_dir, "--save-interval", "100", *(("--async-save",) if sign is signal.SIGINT else ()))
    _wait_for_rows(run_dir, 4, process)
    os.killpg(process.pid, sign)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    rows = _rows(run_dir)
    assert checkpoint_steps(run_dir / "checkpoints") == [rows[-1]["step"]]
    assert f"saved {run_dir}" in out
    done = _run(run_dir, "--save-interval", "100", "--load", "auto")
    assert done.returncode == 0, done.stderr
    resumed = _rows(run_dir)
    assert resumed[len(rows) :] == uninterrupted[len(rows) :]


def test_a_ray_run_is_stopped_by_a_signal_to_all_of_its_processes(tmp_path: Path):
    """As systemd, Slurm and ``timeout`` send it: Ray has to be there until the last step is saved."""
    run_dir = tmp_path / "run"
    process = _start(run_dir, "--save-interval", "100", "--num-rollout", "5000", launcher="ray")
    _wait_for_rows(run_dir, 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert checkpoint_steps(run_dir / "checkpoints") == [_rows(run_dir)[-1]["step"]]
    assert out.splitlines()[-1].endswith(f"run directory: {run_dir}")


def test_auto_starts_anew_where_nothing_was_saved(tmp_path: Path, uninterrupted: list[dict[str, Any]]):
    run_dir = tmp_path / "run"
    rollouts = tmp_path / "rollouts"
    flags = ("--save-interval", "5", "--load", "auto", "--save-debug-rollout-data", str(rollouts))
    process = _start(run_dir, *flags)
    _wait_for_rows(run_dir, 2, process)
    _kill_tree(process.pid)
    process.communicate()
    assert not checkpoint_steps(run_dir / "checkpoints")
    done = _run(run_dir, *flags)
    assert done.returncode == 0, done.stderr
    assert "no checkpoint is there yet" in done.stdout
    assert _rows(run_dir) == uninterrupted
    assert len((run_dir / "metrics-before.jsonl").read_text().splitlines()) >= 2
    assert len(recorded_ids(rollouts / "before")) >= 2
    assert recorded_ids(rollouts) == list(range(STEPS))


@pytest.mark.parametrize("what", ["run", "export"])
def test_a_full_disk_under_anything_else_ends_the_run_in_one_message(tmp_path: Path, what: str):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {mount.stderr!r}")
    try:
        model = write_example(tmp_path, seed=3)
        (disk / "filler").write_bytes(bytes(500_000))
        flags = ["--hf-checkpoint", str(model.hf_checkpoint), "--prompt-data", str(model.prompt_data)]
        flags += ["--rollout-max-response-len", "3", "--eval-interval", "none", "--num-steps-per-rollout", "1"]
        flags += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4"]
        flags += ["--save-hf", str(disk / "hf")] if what == "export" else ["--num-rollout", "500"]
        done = _run(disk / "run" if what == "run" else tmp_path / "run", *flags)
        assert done.returncode == 1
        assert [line for line in done.stderr.splitlines() if "No space left on device" in line]
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_does_not_end_a_run_but_its_last_save_failing_does(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {mount.stderr!r}")
    try:
        done = _run(tmp_path / "run", "--save", str(disk / "saved"), "--save-interval", "3")
        assert done.returncode == 1, done.stderr
        assert "No space left on device" in done.stdout
        assert checkpoint_steps(disk / "saved") == [2, 5]  # a checkpoint takes 1.5 MB
        assert len(_rows(tmp_path / "run")) == STEPS
        again = _run(tmp_path / "again", "--load", str(disk / "saved"))
        assert again.returncode == 0, again.stderr
        assert _rows(tmp_path / "again") == _rows(tmp_path / "run")[6:]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
