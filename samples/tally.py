"""Rows that were skipped, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 5


@dataclass
class BadRows:
    """How many rows were skipped, and the messages of the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.examples) < _KEPT:
            self.examples.append(message)

    def merge(self, other: BadRows) -> None:
        self.count += other.count
        self.examples = (self.examples + other.examples)[:_KEPT]
