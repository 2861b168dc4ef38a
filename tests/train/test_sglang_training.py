"""The built-in example trained with a real SGLang server behind the real router."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rollout.sglang_cases import MARKS
from tests.train.sglang_runs import Comparison, run_watched

pytestmark = MARKS

CHANNELS = ("tensor", "disk", "distributed")
STEPS = 12


def test_after_every_update_over_every_channel_the_server_answers_as_the_embedded_engine(
    tmp_path, monkeypatch, record_property
):
    """One run of twelve steps: four updates by each channel, and the first weights of all."""
    run_dir = tmp_path / "run"
    compare = Comparison(last=STEPS)

    def switch(run, version):
        if version % (STEPS // len(CHANNELS)) == 1:
            run.use_channel(CHANNELS[version // (STEPS // len(CHANNELS))])

    status = run_watched(
        monkeypatch,
        run_dir,
        *("--num-rollout", str(STEPS), "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
        *("--global-batch-size", "64", "--weight-update-channel", "tensor"),
        before_update=switch,
        after_update=compare,
    )
    assert status == 0
    assert compare.versions == list(range(STEPS + 1))
    steps = metrics_of(run_dir)
    assert len(steps) == STEPS
    # Of stale weights the difference grows with every step, to tenths.
    differences = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    assert max(differences) < 1e-4
    record_property(
        "table",
        f"{STEPS} steps, {len(compare.versions)} updates: greedy tokens equal after each; log-probabilities at most "
        f"{compare.largest:.1e} apart; train_rollout_logprob_abs_diff at most {max(differences):.1e}",
    )
    logs = run_dir / "servers"
    assert {"actor-0-regular-0.log", "router-actor.log"} <= {path.name for path in logs.iterdir()}
    assert not list(logs.glob("weights*"))


@pytest.mark.nightly
@pytest.mark.parametrize("channel", CHANNELS)
def test_the_command_learns_with_a_server_whose_weights_are_the_trainers(channel, tmp_path):
    """Under Ray: trainer, rollout worker and server in processes of their own."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "train", "--accelerator", "cpu", "--rollout-engine", "sglang"]
    command += ["--weight-update-channel", channel, "--num-rollout", str(STEPS), "--output-dir", str(run_dir)]
    command += ["--rollout-batch-size", "16", "--global-batch-size", "64", "--progress", "plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = metrics_of(run_dir)
    assert len(steps) == STEPS
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-4
    assert steps[-1]["rollout/raw_reward"] > steps[0]["rollout/raw_reward"]


@pytest.mark.nightly
def test_in_bf16_training_and_the_server_differ_by_its_rounding(tmp_path, monkeypatch, record_property):
    run_dir = tmp_path / "run"
    flags = ("--bf16", "--num-rollout", "4", "--rollout-batch-size", "16", "--global-batch-size", "64")
    assert run_watched(monkeypatch, run_dir, *flags, "--weight-update-channel", "tensor") == 0
    differences = [step["train/train_rollout_logprob_abs_diff"] for step in metrics_of(run_dir)]
    record_property("table", f"bf16: train_rollout_logprob_abs_diff {', '.join(f'{one:.1e}' for one in differences)}")
    assert 0 < max(differences) < 0.05  # a mean over tokens; bf16 has eight bits


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
