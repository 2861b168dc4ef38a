"""The built-in example trained with a real SGLang server behind the real router."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rollout.sglang_cases import MARKS

pytestmark = [*MARKS, pytest.mark.nightly]  # a minute of processor time each


@pytest.mark.parametrize("channel", ["disk", "tensor"])
def test_the_example_learns_with_a_server_whose_weights_are_the_trainers(channel, tmp_path):
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "train",
        "--accelerator",
        "cpu",
        "--launcher",
        "inline",
        "--output-dir",
        str(run_dir),
    ]
    command += ["--rollout-engine", "sglang", "--weight-update-channel", channel, "--num-rollout", "12"]
    command += [
        "--rollout-batch-size",
        "16",
        "--global-batch-size",
        "64",
        "--progress",
        "plain",
        "--eval-interval",
        "12",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 12
    # Of stale weights the difference grows with every step, to tenths.
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-4
    assert steps[-1]["rollout/raw_reward"] > steps[0]["rollout/raw_reward"]
    logs = run_dir / "servers"
    assert {"actor-0-regular-0.log", "router-actor.log"} <= {path.name for path in logs.iterdir()}
    assert not (logs / "weights").exists()
