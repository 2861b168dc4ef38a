"""Whole runs of the command: both launchers, interrupts, and folders of the user's with names of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ACCELRL = Path(sys.executable).with_name("accelrl")


def _run(output_dir: Path, *flags: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [str(ACCELRL), "train", "--accelerator", "cpu", "--output-dir", str(output_dir), *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False, cwd=cwd)


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


def test_inline_and_ray_give_the_same_numbers(tmp_path: Path) -> None:
    runs = {}
    for launcher in ("inline", "ray"):
        done = _run(tmp_path / launcher, "--launcher", launcher, "--num-rollout", "4", "--seed", "3")
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / launcher) in done.stdout.splitlines()[-1]
        runs[launcher] = [_without_times(row) for row in _metrics(tmp_path / launcher)]
    assert len(runs["ray"]) == 4
    assert runs["inline"] == runs["ray"]
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in runs["ray"]) <= 1e-4


@pytest.mark.parametrize(
    "layout", [("--tensor-model-parallel-size", "2"), ("--actor-num-gpus-per-node", "2")], ids=["tensor", "data"]
)
def test_two_trainer_ranks_start_as_one_does(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """The first rollout is the same whatever trains; from then on the layouts differ by rounding."""
    flags = ("--num-rollout", "2", "--seed", "1")
    environment = {"ACCELRL_CPU_DEVICES": "2"}
    os.environ.update(environment)
    try:
        two = _run(tmp_path / "two", *flags, *layout)
        one = _run(tmp_path / "one", *flags, "--launcher", "inline")
    finally:
        del os.environ["ACCELRL_CPU_DEVICES"]
    assert two.returncode == 0, two.stderr
    assert one.returncode == 0, one.stderr
    assert re.search(r"weights read: rank 0 0\.\d MB in \d+ tensors; rank 1 0\.\d MB", two.stdout)
    assert re.search(r"weights read: rank 0 0\.\d MB in \d+ tensors$", one.stdout, re.MULTILINE)
    first_of_two, first_of_one = _metrics(tmp_path / "two")[0], _metrics(tmp_path / "one")[0]
    assert first_of_two["rollout/raw_reward"] == first_of_one["rollout/raw_reward"]
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        # The loss of a first step is a sum of advantages that cancel: next to nothing, where only rounding is left.
        assert first_of_two[key] == pytest.approx(first_of_one[key], rel=1e-5, abs=1e-7)
    assert not list((tmp_path / "two").glob("*.store*"))


def test_two_pipeline_stages_train_as_one_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of every step, the saved model, and a checkpoint of two stages that one rank goes on from."""
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "2")
    flags = ("--num-rollout", "3", "--seed", "1", "--lr", "1e-4")
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "3")
    stages = ("--launcher", "ray", "--pipeline-model-parallel-size", "2")
    two = _run(tmp_path / "two", *flags, *stages, *saving, "--save-hf", str(tmp_path / "two hf"))
    assert two.returncode == 0, two.stderr
    one = _run(tmp_path / "one", *flags, "--launcher", "inline", "--save-hf", str(tmp_path / "one hf"))
    assert one.returncode == 0, one.stderr
    steps_of_two, steps_of_one = _metrics(tmp_path / "two"), _metrics(tmp_path / "one")
    assert len(steps_of_two) == 3
    for several, single in zip(steps_of_two, steps_of_one, strict=True):
        assert _without_times(several) == pytest.approx(_without_times(single), rel=1e-3, abs=1e-6)
        assert several["train/train_rollout_logprob_abs_diff"] <= 1e-4
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("two hf", "one hf")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=1e-5)
    more = ("--launcher", "inline", "--num-rollout", "4", "--seed", "1", "--lr", "1e-4")
    resumed = _run(tmp_path / "more", *more, "--load", str(tmp_path / "saved"))
    assert resumed.returncode == 0, resumed.stderr
    assert _metrics(tmp_path / "more")[-1]["step"] == 3


def test_stages_that_do_not_divide_the_layers_are_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "3")
    done = _run(tmp_path / "run", "--launcher", "ray", "--num-rollout", "1", "--pipeline-model-parallel-size", "3")
    assert done.returncode != 0
    assert "--pipeline-model-parallel-size 3 does not divide the model's num_hidden_layers=2" in done.stderr


@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_ctrl_c_ends_the_step_and_stops_cleanly(tmp_path: Path, launcher: str) -> None:
    argv = [
        str(ACCELRL),
        "train",
        "--accelerator",
        "cpu",
        "--launcher",
        launcher,
        "--output-dir",
        str(tmp_path / "run"),
    ]
    argv += ["--save-hf", str(tmp_path / "hf")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait_for_steps(tmp_path / "run", 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted after" in out.splitlines()[-1]
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert _metrics(tmp_path / "run")
    assert not _processes_of(process.pid)


def test_folders_named_like_ours_do_not_shadow_them(tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "__init__.py").write_text("raise RuntimeError('the wrong hooks')\n")
    (tmp_path / "train.py").write_text("raise RuntimeError('the wrong train')\n")
    (tmp_path / "my_rewards.py").write_text("def score(args, sample):\n    return float(sample.response == '7')\n")
    done = _run(
        tmp_path / "run", "--num-rollout", "1", "--custom-rm-path", "my_rewards.score", "--user-code-dir", ".",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    path = run_dir / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def _processes_of(session: int) -> list[str]:
    """Command lines of the processes that still run in a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
        except FileNotFoundError:
            continue  # it ended while we looked
    return found
