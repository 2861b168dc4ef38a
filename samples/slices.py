"""``FILE@[a:b]``: a prompt file, and which of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from samples.errors import InputError

_SPEC = re.compile(r"(?P<path>.+)@\[\s*(?P<start>-?\d{1,18})?\s*:\s*(?P<stop>-?\d{1,18})?\s*\]", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class RowSlice:
    """``start:stop`` with the meaning it has for a Python list. Rows count from 0; blank lines are none."""

    start: int | None = None
    stop: int | None = None

    def bounds(self, count_rows: Callable[[], int]) -> tuple[int, int | None]:
        """First row and the row before which to stop (None: at the end), neither negative.

        The rows are counted only where a negative bound needs it, so that the head of a huge file costs its head.
        """
        start, stop = self.start or 0, self.stop
        if start < 0 or (stop is not None and stop < 0):
            start, stop, _ = slice(start, stop).indices(count_rows())
        return start, stop

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return ""
        return f"@[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


def parse_file_spec(spec: str, flag: str = "--prompt-data") -> tuple[str, RowSlice]:
    """Path and slice of one value of ``flag``."""
    match = _SPEC.fullmatch(spec)
    if match is not None:
        start, stop = (None if text is None else int(text) for text in (match["start"], match["stop"]))
        return match["path"], RowSlice(start, stop)
    if "@[" in spec:
        raise InputError(f"{flag} {spec!r}: expected FILE@[a:b] with whole numbers, for example train.jsonl@[0:1000]")
    return spec, RowSlice()
