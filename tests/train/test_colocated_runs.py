"""Whole runs in which trainer and engine take turns: the same numbers as without, also when resumed and when saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TURNS = ("--colocate", "--check-offload-equal", "--check-weight-update-equal")
FIGURES = {
    f"memory/{side}/{turn}" for side in ("trainer", "rollout") for turn in ("generating", "training", "updating")
}
ON_MUSA = ("--accelerator", "musa", "--emulate")


def train(run_dir: Path, *flags: str, **environment: str) -> list[dict[str, Any]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MUSA_", "ACCELRL_"))}
    command = [sys.executable, "-m", "train", "--output-dir", str(run_dir), "--seed", "1", "--progress", "off", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT, env=inherited | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not tell the time or the memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))} for row in rows]


@pytest.mark.slow
def test_a_run_in_turns_is_the_run_without_also_when_it_is_saved_and_resumed(tmp_path):
    inline = ("--accelerator", "cpu", "--launcher", "inline", "--num-rollout", "4")
    plain = train(tmp_path / "plain", *inline)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--async-save")
    turns = train(tmp_path / "turns", *inline, *TURNS, *saves, "--save-hf", str(tmp_path / "hf"))
    assert learned(turns) == learned(plain)
    assert all(row.keys() >= FIGURES for row in turns)
    assert not any(FIGURES & row.keys() for row in plain)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 0
    checkpoint = min((tmp_path / "saved").glob("step_*"))
    resumed = train(tmp_path / "resumed", *inline, *TURNS, "--load", str(checkpoint))
    assert learned(resumed) == learned(plain)[2:]
    assert not list(tmp_path.rglob("accelrl-offload-*"))


@pytest.mark.slow
def test_under_ray_too(tmp_path):
    plain = train(tmp_path / "plain", "--accelerator", "cpu", "--num-rollout", "2")
    turns = train(tmp_path / "turns", "--accelerator", "cpu", *TURNS, "--num-rollout", "2")
    assert learned(turns) == learned(plain)


@pytest.mark.emulated
def test_on_one_emulated_device_each_side_gives_back_nine_tenths_of_its_memory(tmp_path):
    rows = train(tmp_path / "run", *ON_MUSA, *TURNS, "--num-rollout", "2", ACCELRL_EMULATED_DEVICES="1")
    for row in rows:
        assert row["memory/trainer/generating"] < 0.1 * row["memory/trainer/training"]
        assert row["memory/rollout/training"] < 0.1 * row["memory/rollout/generating"]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["inline", "ray"])
@pytest.mark.parametrize("accelerator", [("--accelerator", "cpu"), ON_MUSA], ids=["cpu", "musa"])
def test_the_example_is_learned_in_turns(accelerator, launcher, tmp_path):
    rows = train(tmp_path / "run", *accelerator, "--launcher", launcher, *TURNS, ACCELRL_EMULATED_DEVICES="1")
    assert sum(row["rollout/raw_reward"] for row in rows[-10:]) / 10 > 0.9


@pytest.mark.nightly
def test_of_200_million_parameters_less_than_a_fifth_stays_on_the_host(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.offload", "--accelerator", "cpu", "--json", str(result)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1800)
    document = json.loads(result.read_text())
    assert document["parameters"] > 190e6
    for side, figures in document["sides"].items():
        assert figures["share"] < 0.2, (side, figures)
