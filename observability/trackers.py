"""Where metrics go: one protocol, and the file that every run writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes the metrics of each step. ``close`` may be called twice; nothing is logged after it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Appends one JSON object a step to ``path``: ``{"step": 3, "rollout/raw_reward": 0.5, ...}``.

    Strict JSON: a value that is not finite is written as null, and ``"nonfinite"`` names it and says what it was
    (``{"train/loss": "nan"}``), since the step that went wrong is the one that will be looked up. Each line reaches the
    operating system before ``log`` returns. Opening a file whose last line was cut off by a kill removes that line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_unfinished_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = (json.dumps(step_record(step, metrics), allow_nan=False) + "\n").encode()
        write_all(self._file, line, self.path, f" while writing step {step}")

    def close(self) -> None:
        self._file.close()


class MultiTracker:
    """Hands everything to several trackers, in order. An error of one is raised once the others have had their turn."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Any) -> None:
        first: Exception | None = None
        for tracker in self._trackers:
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001 - raised below
                first = first or error
        if first is not None:
            raise first


def write_all(file: RawIOBase, data: bytes, path: Path, doing: str = "") -> None:
    """Write all of ``data`` to an unbuffered file; an error, as of a full disk, names the file."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{doing}", str(path)) from error


def step_record(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The JSON-ready object of one step. Values are what ``float()`` takes, except text; integers stay integers."""
    record: dict[str, Any] = {"step": int(step)}
    nonfinite: dict[str, str] = {}
    for key, value in metrics.items():
        if key in ("step", "nonfinite"):
            raise ValueError(f"{key!r} is a name of the record itself and cannot be a metric")
        if isinstance(value, str | bytes) or value is None:
            raise TypeError(f"metric {key!r} must be a number, not {value!r}")
        number = int(value) if isinstance(value, int) else float(value)
        finite = isinstance(number, int) or math.isfinite(number)
        record[key] = number if finite else None
        if not finite:
            nonfinite[key] = str(number)
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
