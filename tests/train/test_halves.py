"""Whole runs with evaluations, and of one half of the loop without the other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ACCELRL = Path(sys.executable).with_name("accelrl")
SHORT = [
    *("--num-rollout", "3", "--rollout-batch-size", "8", "--max-sampling-rounds", "2"),
    *("--num-steps-per-rollout", "1", "--lr", "1e-3"),
]


def _run(
    output_dir: Path, *flags: str, launcher: str = "inline", command: tuple[str, ...] = (str(ACCELRL), "train")
) -> str:
    argv = [*command, "--accelerator", "cpu", "--launcher", launcher, "--output-dir", str(output_dir), *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _metrics(run_dir: Path, *left_out: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", *left_out))} for row in rows]


def test_training_is_the_same_with_and_without_evaluation(tmp_path: Path) -> None:
    sampled = ("--eval-temperature", "1.0", "--n-samples-per-eval-prompt", "4", "--eval-max-response-len", "9")
    said = _run(tmp_path / "with", *SHORT, "--eval-interval", "2", *sampled)
    _run(tmp_path / "without", *SHORT, "--eval-interval", "none")
    rows = _metrics(tmp_path / "with")
    assert (
        _metrics(tmp_path / "with", "eval") == _metrics(tmp_path / "without", "eval") == _metrics(tmp_path / "without")
    )
    assert [sorted({key.split("/")[0] for key in row if key.startswith("eval")}) for row in rows] == [
        ["eval_before_train"],
        ["eval"],
        ["eval"],
    ]
    assert rows[2]["eval/held_out/num_samples"] == 800
    assert {f"eval/held_out/pass@{k}" for k in (1, 2, 4)} <= rows[2].keys()
    assert "evaluation after step 2: mean reward held_out" in said


def test_both_launchers_evaluate_alike(tmp_path: Path) -> None:
    flags = (*SHORT, "--eval-interval", "1", "--skip-eval-before-train")
    for launcher in ("inline", "ray"):
        _run(tmp_path / launcher, *flags, launcher=launcher)
    assert _metrics(tmp_path / "inline") == _metrics(tmp_path / "ray")
    assert all("eval/held_out" in row for row in _metrics(tmp_path / "ray"))
    assert not any(key.startswith("eval_before") for row in _metrics(tmp_path / "ray") for key in row)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rollouts stand in its directory under ``rollouts``."""
    directory = tmp_path_factory.mktemp("recorded") / "run"
    _run(directory, *SHORT, "--save-debug-rollout-data", str(directory / "rollouts"), "--save-interval", "2")
    return directory


@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_replay_gives_the_recorded_numbers_to_the_last_bit(tmp_path: Path, recorded: Path, launcher: str) -> None:
    flags = ("--config", str(recorded / "config.toml"), "--load-debug-rollout-data", str(recorded / "rollouts"))
    said = _run(tmp_path / "replay", *flags, "--debug-train-only", launcher=launcher)
    assert _metrics(tmp_path / "replay") == _metrics(recorded, "eval")
    assert all({"train/loss", "train/grad_norm"} <= row.keys() for row in _metrics(tmp_path / "replay"))
    assert "starting the rollout engine" not in said
    assert "changed since" not in said
    assert "--save-interval 2 is left aside" in said
    assert not (tmp_path / "replay" / "checkpoints").exists()


def test_a_replay_goes_on_from_a_checkpoint_with_the_rollouts_after_it(tmp_path: Path, recorded: Path) -> None:
    after = tmp_path / "rollouts"
    after.mkdir()
    for path in sorted((recorded / "rollouts").glob("*.jsonl"))[2:]:
        shutil.copy(path, after)
    flags = ["--config", str(recorded / "config.toml"), "--load", str(recorded / "checkpoints" / "step_000001")]
    _run(tmp_path / "replay", *flags, "--load-debug-rollout-data", str(after))
    assert _metrics(tmp_path / "replay") == _metrics(recorded, "eval")[2:]


def test_a_replay_under_other_settings_says_which(tmp_path: Path, recorded: Path) -> None:
    flags = ("--config", str(recorded / "config.toml"), "--load-debug-rollout-data", str(recorded / "rollouts"))
    said = _run(tmp_path / "replay", *flags, "--lr", "0.5")
    assert "--lr 0.001 -> 0.5" in said
    ours, theirs = _metrics(tmp_path / "replay"), _metrics(recorded, "eval")
    assert ours[0]["train/loss"] == theirs[0]["train/loss"]
    assert ours[2]["train/loss"] != theirs[2]["train/loss"]


def test_the_rollout_half_alone_makes_the_first_rollout_of_the_whole(tmp_path: Path, recorded: Path) -> None:
    """In a process where importing Megatron fails."""
    script = "import sys; sys.modules['megatron'] = None\nfrom train.main import main\nsys.exit(main(sys.argv[1:]))"
    out = tmp_path / "rollouts"
    flags = (*SHORT, "--num-rollout", "2", "--debug-rollout-only", "--save-debug-rollout-data", str(out))
    _run(tmp_path / "run", *flags, command=(sys.executable, "-P", "-c", script))
    first, whole = (
        [
            json.loads(line) | {"weight_version": 0, "last_weight_version": 0, "weight_version_spans": None}
            for line in (folder / "rollout_000000.jsonl").read_text().splitlines()[1:]
        ]
        for folder in (out, recorded / "rollouts")
    )
    assert first == whole
    rows = _metrics(tmp_path / "run")
    assert len(rows) == 2
    assert not any(key.startswith("train/") for row in rows for key in row)


def test_the_rollout_half_runs_on_ray(tmp_path: Path) -> None:
    flags = (*SHORT, "--num-rollout", "1", "--debug-rollout-only")
    _run(tmp_path / "run", *flags, launcher="ray")
    assert "rollout/raw_reward" in _metrics(tmp_path / "run")[0]
