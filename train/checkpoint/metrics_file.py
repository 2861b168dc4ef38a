"""metrics.jsonl of a run that goes on: steps after the checkpoint will be made again, so their rows go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from observability.step_file import parse_step


def rewind_metrics(path: Path, step: int) -> tuple[list[dict[str, Any]], int]:
    """Remove the rows of steps after ``step``; returns the rows that stay and how many were removed.

    A line that a kill cut off is removed too; another that is no record of a step is an InputError. The file changes in
    one go, or not at all.
    """
    if not path.exists():
        return [], 0
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]
    rows = [parse_step(path, number, line) for number, line in enumerate(lines, 1)]
    kept = [(line, row) for line, row in zip(lines, rows, strict=True) if row["step"] <= step]
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return [row for _, row in kept], len(rows) - len(kept)
