"""The loop on the emulated MUSA device: the same command, the same numbers, and nothing of it left on the host."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.emulated

ON_MUSA = ("--accelerator", "musa", "--emulate")
FIRST_STEPS = ("--num-rollout", "2", "--seed", "1")
# What cuts the trainer into ranks, and the devices that it needs with one for rollout.
LAYOUTS = {
    "one-rank": ((), "2"),
    "tensor": (("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"), "3"),
    "data": (("--actor-num-gpus-per-node", "2"), "3"),
}

# The first rollout of the inline loop, then a look at every matrix of floats that the process holds.
MATRICES = """
import gc, sys, torch
from observability import Progress
from train.config import cli
from train.example import EXAMPLE_SETTINGS
from train.inline import InlineRuntime
from train.prepare import prepare

prepared = prepare(cli.parse(sys.argv[1:], EXAMPLE_SETTINGS))
runtime = InlineRuntime(prepared.config, prepared.accelerator, Progress("plain", 1), prepared.run_dir)
runtime.start()
print("reward", runtime.step(0).metrics["rollout/raw_reward"])
gc.unfreeze()
held = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.is_floating_point() and o.ndim >= 2]
print("on", sorted({str(tensor.device) for tensor in held if tensor.numel() > 1000}), len(held) > 40)
runtime.close()
"""


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MUSA_", "ACCELRL_"))}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environ, cwd=ROOT)


def train(run_dir: Path, *flags: str, **environment: str) -> list[dict[str, Any]]:
    done = run_python("-m", "train", "--output-dir", str(run_dir), *flags, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_policy_and_engine_live_on_the_device(tmp_path, asynchronous):
    flags = (*ON_MUSA, "--launcher", "inline", "--output-dir", str(tmp_path / "run"))
    done = run_python("-c", MATRICES, *flags, ACCELRL_EMULATE_ASYNC=asynchronous)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on ['musa:0'] True" in done.stdout


def test_recorded_rollouts_train_as_on_the_host(tmp_path):
    recorded = tmp_path / "recorded"
    record = ("--num-rollout", "5", "--save-debug-rollout-data", str(recorded))
    train(tmp_path / "record", "--accelerator", "cpu", "--launcher", "inline", *record)
    replay = ("--launcher", "inline", "--hf-checkpoint", str(tmp_path / "record" / "example" / "model"))
    replay += ("--load-debug-rollout-data", str(recorded), "--debug-train-only", "--trainer-threads", "1")
    on_host = train(tmp_path / "cpu", "--accelerator", "cpu", *replay)
    on_musa = train(tmp_path / "musa", *ON_MUSA, *replay)
    assert len(on_host) == len(on_musa) == 5
    for host, musa in zip(on_host, on_musa, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert musa[key] == pytest.approx(host[key], rel=1e-5), key


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """The first steps on the host, on one rank: what every layout has to give, on any device."""
    return train(tmp_path_factory.mktemp("host") / "run", "--accelerator", "cpu", "--launcher", "inline", *FIRST_STEPS)


@pytest.mark.parametrize(("layout", "devices"), LAYOUTS.values(), ids=LAYOUTS)
def test_under_ray_the_first_steps_are_those_of_the_host(tmp_path, on_host, layout, devices):
    on_musa = train(tmp_path / "musa", *ON_MUSA, *FIRST_STEPS, *layout, ACCELRL_EMULATED_DEVICES=devices)
    assert on_musa[0]["rollout/raw_reward"] == on_host[0]["rollout/raw_reward"]
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert on_musa[0][key] == pytest.approx(on_host[0][key], rel=1e-4), key
    assert on_musa[1]["train/train_rollout_logprob_abs_diff"] < 1e-4  # the new weights arrived


@pytest.mark.skipif(importlib.util.find_spec("torchada") is None, reason="torchada is not installed")
def test_the_vendors_wrapper_trains_as_the_import_hook_does(tmp_path):
    flags = (*ON_MUSA, "--launcher", "inline", "--num-rollout", "2")
    rows = {route: train(tmp_path / route, *flags, ACCELRL_MUSA_ROUTE=route) for route in ("hook", "torchada")}
    for hook, torchada in zip(rows["hook"], rows["torchada"], strict=True):
        for key in ("rollout/raw_reward", "train/loss", "train/grad_norm"):
            assert torchada[key] == hook[key], key


def test_a_run_says_that_it_is_emulated(tmp_path):
    done = run_python(
        "-m",
        "train",
        "--accelerator",
        "musa",
        "--launcher",
        "inline",
        "--num-rollout",
        "1",
        "--output-dir",
        str(tmp_path / "run"),
        ACCELRL_EMULATE_MUSA="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated       True" in done.stdout + done.stderr
    assert "emulated = true" in (tmp_path / "run" / "config.toml").read_text()
    assert "Emulated accelerator" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "devices"), LAYOUTS.values(), ids=LAYOUTS)
def test_whole_runs_learn_as_on_the_host(tmp_path, layout, devices):
    def last_reward(rows: list[dict[str, Any]]) -> float:
        return sum(row["rollout/raw_reward"] for row in rows[-10:]) / 10

    on_musa = last_reward(train(tmp_path / "musa", *ON_MUSA, *layout, ACCELRL_EMULATED_DEVICES=devices))
    on_host = last_reward(train(tmp_path / "cpu", "--accelerator", "cpu", *layout, ACCELRL_CPU_DEVICES=devices))
    assert on_musa >= 0.9
    assert abs(on_musa - on_host) <= 0.05
