"""A run directory, read back."""

from __future__ import annotations

import math
import tomllib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from observability.history import History
from observability.step_file import parse_step
from observability.transcripts import Transcript, by_step, read_transcripts
from samples.errors import InputError


@dataclass
class Series:
    """The values of one metric; ``nan`` where the value was not finite, and ``nonfinite`` says which it was."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    nonfinite: dict[int, str] = field(default_factory=dict)

    def add(self, step: int, value: float | None, was: str | None) -> None:
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)
        if value is None:
            self.nonfinite[step] = was or "null"

    def forget_from(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            self.nonfinite.pop(self.steps.pop(), None)
            self.values.pop()


@dataclass
class RunRecord:
    """What a report shows of a run."""

    name: str
    facts: dict[str, Any]  # the table [run] of config.toml
    config: dict[str, Any]
    config_text: str
    steps: array[int]
    history: History
    series: dict[str, Series]
    transcripts: dict[int, list[Transcript]]
    files: dict[str, str]  # relative name -> what it is; those that are there

    @property
    def planned_steps(self) -> int | None:
        planned = self.config.get("job", {}).get("num_rollout")
        return planned if isinstance(planned, int) else None

    def latest(self, key: str) -> float | None:
        """The last finite value of a metric."""
        series = self.series.get(key)
        finite = [value for value in series.values if math.isfinite(value)] if series else []
        return finite[-1] if finite else None


HISTORY = ("rollout/raw_reward", "perf/step_time")

FILES = {
    "metrics.jsonl": "every metric of every step",
    "samples.jsonl": "the transcripts, and those of more steps than are shown here",
    "config.toml": "the configuration; accelrl train --config takes it",
    "tensorboard": "TensorBoard's event files",
    "wandb": "files of Weights & Biases",
    "checkpoints": "checkpoints",
}


def read_run(run_dir: Path, wanted: Callable[[str], bool]) -> RunRecord:
    """The record of ``run_dir``, with the metrics whose names are ``wanted``. Raises InputError when it is no run's."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise InputError(f"{run_dir} is not the directory of a run: it has no metrics.jsonl")
    config_path = run_dir / "config.toml"
    try:
        text = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
        config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise InputError(f"{config_path} is not valid TOML: {error}") from error
    for section in ("run", "job"):
        if not isinstance(config.get(section, {}), dict):
            raise InputError(f"{config_path}: {section} is not a table, so no run wrote it")
    samples = run_dir / "samples.jsonl"
    record = RunRecord(
        name=run_dir.resolve().name,
        facts=config.pop("run", {}),
        config=config,
        config_text=text,
        steps=array("q"),
        history=History(),
        series={},
        transcripts=by_step(read_transcripts(samples)) if samples.is_file() else {},
        files={name: what for name, what in FILES.items() if (run_dir / name).exists()},
    )
    for line in _lines(metrics):
        _add(record, line, wanted)
    record.history = _history(record)
    return record


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines, oldest first. Of a step that a resumed run made again, all stand in the file; so do they here."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # cut off by a kill
            yield parse_step(path, number, line)


def _add(record: RunRecord, line: dict[str, Any], wanted: Callable[[str], bool]) -> None:
    step = int(line["step"])
    if record.steps and step <= record.steps[-1]:  # made again by a run that went on from a checkpoint
        while record.steps and record.steps[-1] >= step:
            record.steps.pop()
        for series in record.series.values():
            series.forget_from(step)
    record.steps.append(step)
    nonfinite = line.get("nonfinite", {})
    for key, value in line.items():
        if key in HISTORY or wanted(key):
            record.series.setdefault(key, Series()).add(step, value, nonfinite.get(key))


def _history(record: RunRecord) -> History:
    """The run's history as its progress display had it."""
    found = {
        key: dict(zip(series.steps, series.values, strict=True))
        for key, series in record.series.items()
        if key in HISTORY
    }
    history = History()
    for step in record.steps:
        values = {key: by_step[step] for key, by_step in found.items() if step in by_step}
        if not math.isfinite(values.get("perf/step_time", math.nan)):
            values.pop("perf/step_time", None)
        history.add(step, values)
    return history
