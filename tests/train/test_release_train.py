"""``--release-train``: the numbers of a run are the same, and no trainer lives while the rollout generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from samples.errors import InputError
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.manifest import TrainerState
from train.checkpoint.released import ReleasedState
from train.checkpoint.tensor_files import write_file
from train.config.cli import parse

ACCELRL = Path(sys.executable).with_name("accelrl")
REWARD = """
import json, os
from pathlib import Path


def reward(args, sample):
    if sample.index % 4 == 0:
        with open(os.environ["SEEN"], "a") as seen:
            seen.write(json.dumps([sample.rollout_id, trainers()]) + chr(10))
    return float(len(set(sample.response)))


def trainers():
    own = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[3]  # session, Ray's
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            session = (line.parent / "stat").read_text().rpartition(")")[2].split()[3]
            if session == own and "TrainerActor" in line.read_text():
                found.append(int(line.parent.name))
        except OSError:
            continue
    return found
"""


def _run(directory: Path, *flags: str) -> list[dict[str, Any]]:
    argv = [
        str(ACCELRL), "train", "--accelerator", "cpu", "--launcher", "ray", "--num-rollout", "3", "--seed", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2", "--lr", "1e-3",
        "--eval-interval", "2", "--save-interval", "2", "--output-dir", str(directory / "run"),
        "--trainer-threads", "1", "--rollout-threads", "1", "--custom-rm-path", "rewards_here.reward",
        "--user-code-dir", str(directory.parent),
        "--save-hf", str(directory / "hf"), *flags,
    ]  # fmt: skip
    (directory.parent / "rewards_here.py").write_text(REWARD)
    directory.mkdir()
    environment = os.environ | {"SEEN": str(directory / "seen"), "ACCELRL_CPU_DEVICES": "2"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def _what_was_learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without times, and without memory, which is what differs."""
    return [{key: value for key, value in row.items() if not key.startswith(("perf/", "memory/"))} for row in rows]


def _trainers_seen(directory: Path) -> list[list[int]]:
    return [json.loads(line)[1] for line in (directory / "seen").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="one rank"),
        pytest.param(
            ("--actor-num-gpus-per-node", "2", "--weight-update-channel", "distributed", "--bf16"),
            marks=pytest.mark.nightly,
            id="two data ranks, bf16, distributed",
        ),
        pytest.param(("--colocate", "--no-offload-train"), marks=pytest.mark.nightly, id="on the engine's device"),
    ],
)
def test_a_run_whose_trainer_comes_and_goes_is_the_run_with_one_that_stays(tmp_path: Path, flags: tuple[str, ...]):
    stays, goes = tmp_path / "stays", tmp_path / "goes"
    expected = _run(stays, *flags)
    rows = _run(goes, *flags, "--release-train")
    assert _what_was_learned(rows) == _what_was_learned(expected)
    assert all(_trainers_seen(stays))
    assert not any(_trainers_seen(goes))
    assert len(_trainers_seen(goes)) == len(_trainers_seen(stays)) > 0
    for name in ("run/checkpoints/step_000001", "run/checkpoints/step_000002", "hf"):
        for file in (stays / name).glob("*.safetensors"):
            one, other = load_file(file), load_file(goes / name / file.name)
            assert one.keys() == other.keys()
            assert all(one[tensor].equal(other[tensor]) for tensor in one)
    assert all(row["perf/release_train_time"] > 0 and row["perf/remake_train_time"] > 0 for row in rows)
    assert not (goes / "run" / "released_trainer").exists()


def test_one_state_is_kept_until_the_next_is_whole_and_goes_into_checkpoints(tmp_path: Path):
    state = ReleasedState(tmp_path / "released")
    (tmp_path / "released" / "7").mkdir(parents=True)  # of a part of the run that was killed
    for step in range(3):
        before = state.latest
        work = state.begin()
        assert before is None or (before.directory / "model.safetensors").exists()
        facts = write_file(work / "model.safetensors", [bytes([step])])
        kept = state.keep(work, TrainerState(files={"model.safetensors": facts}, optimizer_steps=step))
        assert list((tmp_path / "released").iterdir()) == [kept.directory]
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    assert state.copy_to(checkpoint) == kept.state
    with pytest.raises(CheckpointWriteError, match=r"model\.safetensors"):
        state.copy_to(checkpoint)  # is there already
    state.close()
    assert (checkpoint / "model.safetensors").read_bytes() == bytes([2])
    assert not (tmp_path / "released").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--launcher", "inline"), "--launcher inline: rollout and trainer are one process"),
        (
            ("--rollout-mode", "one-step-off"),
            "--rollout-mode one-step-off: rollout and training go on at the same time",
        ),
        (("--rollout-mode", "fully-async"), "--rollout-mode fully-async: rollout and training go on at the same time"),
        (("--weight-update-channel", "disk_delta"), "disk_delta: a trainer that is made anew"),
        (("--weight-update-channel", "distributed", "--rollout-engine", "sglang"), "servers keep a group"),
        (("--async-save", "--save-interval", "1"), "--async-save: the process that would write it"),
        (("--reload-process-groups", "--actor-num-gpus-per-node", "2"), "--reload-process-groups: all groups end"),
        (("--debug-rollout-only",), "this run does not both generate and train"),
    ],
)
def test_what_cannot_work_or_gains_nothing_is_refused_by_name(flags: tuple[str, ...], said: str):
    with pytest.raises(InputError, match=f"--release-train.*{said}"):
        parse(["--release-train", *flags])
