"""metrics.jsonl, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samples.errors import InputError


def parse_step(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The record of line ``number``. Raises InputError, naming both, for a line that ``JsonlTracker`` never wrote."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}); remove the line") from error
    wrong = _what_is_wrong(record)
    if wrong is not None:
        raise InputError(f"{path}, line {number}: is no record of a step: {wrong}; remove the line")
    return dict(record)


def _what_is_wrong(record: object) -> str | None:
    if not isinstance(record, dict):
        return "not a mapping"
    if type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        return "it has no step"
    nonfinite = record.get("nonfinite", {})
    if not isinstance(nonfinite, dict) or not all(isinstance(was, str) for was in nonfinite.values()):
        return "nonfinite is not a mapping to text"
    for key, value in record.items():
        if key != "nonfinite" and not (value is None or isinstance(value, int | float)):
            return f"{key} is not a number"
    return None
