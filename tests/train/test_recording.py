"""What a run leaves behind, by how it ends; and that every tracker holds the same values."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observability import Progress
from observability.transcripts import read_transcripts
from samples.errors import InputError
from train.config.run import RunConfig
from train.config.tracking import TrackingConfig
from train.loop import StepOutput, StopRequest, run_loop
from train.recording import Recording, check_trackers

ACCELRL = Path(sys.executable).with_name("accelrl")


class Runtime:
    """Steps without workers; ``fail_at`` raises there, ``stop_at`` asks for a stop as Ctrl-C does."""

    def __init__(self, stop: StopRequest, *, fail_at: int | None = None, stop_at: int | None = None) -> None:
        self._stop, self._fail_at, self._stop_at = stop, fail_at, stop_at

    def start(self) -> None: ...

    def step(self, rollout_id: int) -> StepOutput:
        if rollout_id == self._fail_at:
            raise RuntimeError("no more memory at http://user:secret@host/")
        self._stop.requested |= rollout_id == self._stop_at
        transcript = {"rank": "best", "reward": 1.0, "prompt": "p", "response": f"answer {rollout_id}"}
        return StepOutput({"rollout/raw_reward": rollout_id / 10, "train/loss": 1 / (rollout_id + 3)}, [transcript])

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return {}

    def save_state(self, directory: Path) -> Any: ...

    def save_hf(self, directory: Path) -> None: ...

    def close(self) -> None: ...


def record(run_dir: Path, tracking: TrackingConfig | None = None, **options: Any) -> str | None:
    """Run 5 steps; the report's text, or None when there is none."""
    stop, progress = StopRequest(), Progress("off", 5)
    config = RunConfig(tracking=tracking or TrackingConfig())
    fails = pytest.raises(RuntimeError, match="no more memory") if "fail_at" in options else contextlib.nullcontext()
    with fails, Recording(config, run_dir, {"torch": "2"}, progress, stop) as recording:
        run_loop(
            Runtime(stop, **options),
            num_rollout=5,
            tracker=recording.tracker,
            progress=progress,
            stop=stop,
            transcripts=recording.transcripts,
        )
    report = run_dir / "report.html"
    return report.read_text() if report.exists() else None


def test_a_finished_run_has_metrics_events_transcripts_and_the_report(tmp_path: Path) -> None:
    report = record(tmp_path)
    assert report is not None
    assert "answer 4" in report
    assert "This run was" not in report
    assert [t["step"] for t in read_transcripts(tmp_path / "samples.jsonl")] == [0, 1, 2, 3, 4]
    assert _scalars(tmp_path)["train/loss"] == [(s, float(np.float32(1 / (s + 3)))) for s in range(5)]


def test_an_interrupted_run_has_its_report(tmp_path: Path) -> None:
    report = record(tmp_path, stop_at=2)
    assert report is not None
    assert "This run was interrupted." in report
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_failed_has_a_report_of_its_steps_with_the_error(tmp_path: Path) -> None:
    report = record(tmp_path, fail_at=3)
    assert report is not None
    assert "stopped by an error: RuntimeError: no more memory at http://[hidden]@host/" in report
    assert "secret" not in report


def test_a_run_that_failed_before_its_first_step_has_none(tmp_path: Path) -> None:
    assert record(tmp_path, fail_at=0) is None


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    off = TrackingConfig(use_tensorboard=False, report=False, transcripts_per_step=0)
    assert record(tmp_path, off) is None
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_report_that_cannot_be_written_does_not_change_how_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda self, text: said.append(text))
    (tmp_path / "report.html.part").mkdir()
    assert record(tmp_path) is None
    assert said
    assert said[0].startswith("report.html could not be written: ")


def test_wandb_that_is_not_installed_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--use-wandb needs the package wandb.*accelrl\[wandb\]"):
        check_trackers(TrackingConfig(use_wandb=True))
    check_trackers(TrackingConfig())


def _scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={reader.SCALARS: 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()[reader.SCALARS]}


def _start(run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [str(ACCELRL), "train", "--accelerator", "cpu", "--launcher", "inline", "--use-wandb"]
    argv += ["--output-dir", str(run_dir), *flags]
    environment = os.environ | {"WANDB_MODE": "offline", "HOME": str(run_dir.parent / "home")}
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_real_run_has_the_same_values_everywhere(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.wandb_files import history

    process = _start(tmp_path / "run", "--num-rollout", "3")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "wandb: offline" in out
    lines = _lines(tmp_path / "run")
    expected = {key: [] for line in lines for key in line if key != "step"}
    for line in lines:
        for key in line.keys() - {"step"}:
            expected[key].append((line["step"], float(np.float32(line[key]))))
    assert _scalars(tmp_path / "run") == expected
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    rows, _ = history(path)
    assert [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows] == [
        {key: value for key, value in line.items() if key != "step"} for line in lines
    ]
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_ctrl_c_with_wandb_leaves_the_report_and_no_process(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    process = _start(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "This run was interrupted." in (tmp_path / "run" / "report.html").read_text()
