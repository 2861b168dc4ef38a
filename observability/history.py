"""What a run has shown so far, in little memory however long it is, and the line that sums it up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from observability.formats import duration

WINDOW = 10  # steps at either end whose mean reward the summary compares
CURVE_POINTS = 128  # of the stored reward curve; above that, neighbours are merged


class History:
    """Rewards and durations of the steps, bounded. A step without a finite ``rollout/raw_reward`` only counts."""

    def __init__(self) -> None:
        self.steps = 0
        self.last_step: int | None = None
        self.seconds = 0.0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._rewards = 0
        self._recent_seconds: deque[float] = deque(maxlen=20)
        self._curve: list[float] = []  # means of _stride rewards each
        self._stride = 1
        self._open: list[float] = []  # rewards that are not yet a point of the curve

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step = step
        self.steps += 1
        seconds = metrics.get("perf/step_time", 0.0)
        self.seconds += seconds
        self._recent_seconds.append(seconds)
        reward = metrics.get("rollout/raw_reward")
        if reward is not None and math.isfinite(reward):
            self._add_reward(float(reward))

    def _add_reward(self, reward: float) -> None:
        self._rewards += 1
        if len(self._first) < WINDOW:
            self._first.append(reward)
        self._last.append(reward)
        self._open.append(reward)
        if len(self._open) == self._stride:
            self._curve.append(sum(self._open) / self._stride)
            self._open = []
        if len(self._curve) > CURVE_POINTS:
            pairs = zip(self._curve[::2], self._curve[1::2], strict=False)
            odd = self._curve[-1:] if len(self._curve) % 2 else []
            self._open = [value for value in odd for _ in range(self._stride)] + self._open
            self._curve = [(left + right) / 2 for left, right in pairs]
            self._stride *= 2

    def curve(self, points: int) -> list[float]:
        """The reward over the whole run in at most ``points`` means, oldest first."""
        values = self._curve + ([sum(self._open) / len(self._open)] if self._open else [])
        size = math.ceil(len(values) / points) if values else 1
        return [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]

    def ends(self) -> tuple[int, float, float] | None:
        """(k, mean reward of the first k steps, of the last k): k is 10, or half the run when it is shorter than 20."""
        k = min(WINDOW, max(1, self._rewards // 2))
        if not self._rewards:
            return None
        return k, sum(self._first[:k]) / k, sum(list(self._last)[-k:]) / k

    def seconds_per_step(self) -> float | None:
        """Mean of the last 20 steps."""
        return sum(self._recent_seconds) / len(self._recent_seconds) if self._recent_seconds else None


def learned(history: History, *, interrupted: bool = False) -> str:
    """What was learned and how long it took, in one sentence without its full stop."""
    steps = "1 step" if history.steps == 1 else f"{history.steps} steps"
    when = f"{'interrupted after ' if interrupted else 'after '}{steps} ({duration(history.seconds)})"
    ends = history.ends()
    if ends is None:
        return f"No rewards {when}"
    k, first, last = ends
    if history.steps == 1:
        return f"Mean reward {last:.3f} {when}"
    moved = "unchanged at" if f"{first:.3f}" == f"{last:.3f}" else "rose to" if last > first else "fell to"
    window, begin = ("step", "first") if k == 1 else (f"{k} steps", f"first {k}")
    origin = f", from {first:.3f} over the {begin}" if moved != "unchanged at" else ""
    return f"Mean reward {moved} {last:.3f} over the last {window}{origin}, {when}"


def summary_line(history: History, run_dir: str | Path, *, interrupted: bool = False) -> str:
    """What was learned, how long it took and where the run is: the last line that a run prints."""
    return f"{learned(history, interrupted=interrupted)}; run directory: {run_dir}"
