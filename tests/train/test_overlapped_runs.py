"""Whole runs of the overlapped modes: killed and gone on with, no prompt is lost or trained on twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_checkpoint_runs import _kill_tree
from train.checkpoint.directory import checkpoint_steps
from train.example import write_example

pytestmark = pytest.mark.slow

ACCELRL = Path(sys.executable).with_name("accelrl")
STEPS, BATCH, PROMPTS = 9, 8, 24


def _argv(directory: Path, mode: str, launcher: str) -> list[str]:
    if not (directory / "example").exists():
        write_example(directory / "example", seed=0)
    settings = {
        "--accelerator": "cpu",
        "--launcher": launcher,
        "--rollout-mode": mode,
        "--hf-checkpoint": directory / "example" / "model",
        "--prompt-data": f"{directory / 'example' / 'prompts.jsonl'}@[0:{PROMPTS}]",
        "--rollout-batch-size": BATCH,
        "--n-samples-per-prompt": 4,
        "--rollout-max-response-len": 3,
        "--num-rollout": STEPS,
        "--lr": 1e-3,
        "--trainer-threads": 1,
        "--rollout-threads": 1,
        "--output-dir": directory / "run",
        "--save-interval": 2,
        "--load": "auto",
        "--save-debug-rollout-data": directory / "recorded",
    }
    return [str(ACCELRL), "train", *(str(word) for pair in settings.items() for word in pair)]


def _rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _without_times(directory: Path) -> list[dict[str, Any]]:
    """What was logged, but for times and what depends on them."""
    timed = ("perf/", "rollout/async/engine_busy_ratio", "rollout/async/rollout_time")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in _rows(directory)]


def _kill_after(rows: int, argv: list[str], directory: Path) -> None:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(_rows(directory)) < rows:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    _kill_tree(process.pid)
    process.communicate()


def _finish(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _trained_groups(directory: Path) -> list[dict[str, Any]]:
    """The first sample of every group that each step trained on."""
    groups: dict[int, dict[str, Any]] = {}
    trained = []
    for path in sorted((directory / "recorded").glob("rollout_*.jsonl")):
        groups = {}
        for line in path.read_text().splitlines()[1:]:
            sample = json.loads(line)
            groups.setdefault(sample["group_index"], sample)
        trained += list(groups.values())
    return trained


@pytest.mark.parametrize("launcher", ["ray", pytest.param("inline", marks=pytest.mark.nightly)])
def test_a_killed_fully_async_run_trains_on_every_prompt_of_an_epoch_once(tmp_path: Path, launcher: str) -> None:
    argv = _argv(tmp_path, "fully-async", launcher)
    _kill_after(5, argv, tmp_path)
    saved = checkpoint_steps(tmp_path / "run" / "checkpoints")[-1]
    assert 3 <= saved < STEPS - 1
    assert f"after step {saved + 1}" in _finish(argv)
    assert [row["step"] for row in _rows(tmp_path)] == list(range(STEPS))
    trained = _trained_groups(tmp_path)
    assert len(trained) == STEPS * BATCH
    assert sorted(sample["group_index"] for sample in trained) == list(range(STEPS * BATCH))
    drawn = Counter((sample["epoch"], sample["prompt_row"]) for sample in trained)
    assert drawn == Counter({(epoch, row): 1 for epoch in range(3) for row in range(PROMPTS)})
    ages = [sample["train_step"] - sample["weight_version"] for sample in trained]
    assert set(ages) <= {0, 1}
    last = _rows(tmp_path)[-1]
    assert last["rollout/async/groups_drawn"] == STEPS * BATCH + last["rollout/async/groups_returned"]


@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.nightly)])
def test_a_killed_one_step_off_run_goes_on_as_if_it_had_not_been(tmp_path: Path, launcher: str) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    _finish(_argv(whole, "one-step-off", "inline"))
    argv = _argv(killed, "one-step-off", launcher)
    _kill_after(5, argv, killed)
    _finish(argv)
    assert _without_times(killed) == _without_times(whole)
    ages = [row["rollout/async/staleness/max"] for row in _rows(killed)]
    assert ages == [0.0] + [1.0] * (STEPS - 1)
    drawn = Counter((sample["epoch"], sample["prompt_row"]) for sample in _trained_groups(killed))
    assert drawn == Counter({(epoch, row): 1 for epoch in range(3) for row in range(PROMPTS)})


@pytest.mark.parametrize("pause", ["in_place", pytest.param("retract", marks=pytest.mark.nightly)])
def test_responses_that_several_versions_wrote_say_so_in_recordings_and_metrics(tmp_path: Path, pause: str) -> None:
    longer = ("--rollout-max-response-len", "48", "--rollout-min-response-len", "48")
    longer += ("--engine-max-running-requests", "4")  # so that a rollout takes longer than a training step
    argv = [*_argv(tmp_path, "fully-async", "inline"), *longer, "--pause-generation-mode", pause]
    _finish(argv)
    samples = [
        json.loads(line)
        for path in sorted((tmp_path / "recorded").glob("rollout_*.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    mixed = [sample for sample in samples if len(sample["weight_version_spans"]) > 1]
    assert mixed
    for sample in samples:
        spans = sample["weight_version_spans"]
        assert sum(tokens for _, tokens in spans) == sample["response_length"] == len(sample["rollout_log_probs"])
        versions = [version for version, _ in spans]
        assert versions == sorted(set(versions))
        assert (versions[0], versions[-1]) == (sample["weight_version"], sample["last_weight_version"])
    rows = _rows(tmp_path)
    shares = [row["rollout/async/mixed_versions_ratio"] for row in rows]
    assert sum(shares) * BATCH * 4 == pytest.approx(len(mixed))
    assert all(row["rollout/async/token_staleness/max"] <= 1 for row in rows)
    assert ("engine/old_cache_tokens" in rows[-1]) == (pause == "in_place")


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["one-step-off", "fully-async"])
def test_the_built_in_example_is_learned_in_the_overlapped_modes(tmp_path: Path, mode: str) -> None:
    argv = [
        str(ACCELRL),
        "train",
        "--accelerator",
        "cpu",
        "--rollout-mode",
        mode,
        "--output-dir",
        str(tmp_path / "run"),
    ]
    _finish(argv)
    rewards = [row["rollout/raw_reward"] for row in _rows(tmp_path)[-10:]]
    assert sum(rewards) / len(rewards) >= 0.9
