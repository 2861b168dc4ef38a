"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Adds up the seconds of a step's parts, by name: ``with timer.part("rollout"): ...``.

    Entering a part again adds to it. Parts may overlap or nest (rewards are scored while others still generate), so
    they need not sum to the step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Seconds that were measured elsewhere, as in a worker process."""
        self._parts[name] = self._parts.get(name, 0.0) + seconds

    def finish(self, *, tokens: int) -> dict[str, float]:
        """``perf/`` metrics of the step, and the start of the next one. ``tokens``: what its rollout generated."""
        now = self._clock()
        elapsed = now - self._start
        metrics = {"perf/step_time": elapsed}
        metrics |= {f"perf/{name}_time": seconds for name, seconds in self._parts.items()}
        if elapsed > 0:
            metrics["perf/tokens_per_second"] = tokens / elapsed
        self._start, self._parts = now, {}
        return metrics
