"""Rows that were skipped, counted by what was wrong with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_KEPT = 5


@dataclass
class BadRows:
    """How many rows were skipped and why, in a few words each, and the messages of the first few."""

    examples: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.kinds.total()

    @property
    def reasons(self) -> str:
        """``60 not JSON, 39 without a usable prompt``: the most frequent first."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())

    def add(self, message: str, kind: str) -> None:
        self.kinds[kind] += 1
        if len(self.examples) < _KEPT:
            self.examples.append(message)

    def merge(self, other: BadRows) -> None:
        self.kinds += other.kinds
        self.examples = (self.examples + other.examples)[:_KEPT]
