"""Counts of groups over a whole run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Totals:
    """Groups since the start of the run, over all its resumes. Every dispatch ends in exactly one of the others, is in
    flight or waits: ``drawn = trained + dropped + returned + failed + in flight + waiting``."""

    drawn: int = 0  # dispatched; a group that came back and is dispatched again counts again
    trained: int = 0
    dropped: int = 0  # rejected by the filter, or emptied by a hook
    failed: int = 0  # raised once too often: the run ended on its error
    returned: int = 0  # went back to the source, for one of the causes below
    aborted: int = 0  # by the engine, such as for new weights
    retried: int = 0  # raised
    stale: int = 0  # finished, but too old for the bound that a resumed run has
    cut_short: int = 0  # under way when a process ended

    def to_dict(self) -> dict[str, int]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Totals:
        return cls(**{name: int(value) for name, value in values.items()})
