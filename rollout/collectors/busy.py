"""How much was under way over time."""

from __future__ import annotations

from collections.abc import Callable


class BusyMeter:
    """The share of the time with something under way, and how much on average, since the last reading."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._since = self._began = clock()
        self._busy = self._area = 0.0

    def set(self, count: int) -> None:
        """From now on ``count`` are under way."""
        self._advance()
        self._count = count

    def read(self) -> tuple[float, float]:
        """(share of the time with anything under way, mean number under way); a new reading begins."""
        self._advance()
        elapsed = self._since - self._began
        share, mean = (self._busy / elapsed, self._area / elapsed) if elapsed > 0 else (0.0, float(self._count))
        self._began, self._busy, self._area = self._since, 0.0, 0.0
        return share, mean

    def _advance(self) -> None:
        now = self._clock()
        if self._count:
            self._busy += now - self._since
            self._area += self._count * (now - self._since)
        self._since = now
