"""Axes of a chart: where a number stands, and which numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from observability.formats import compact


@dataclass(frozen=True)
class Scale:
    """Numbers to places along one axis; ``log`` takes logarithms first."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def limits(numbers: Sequence[float], *, from_zero: bool = False, log: bool = False) -> tuple[float, float, bool]:
    """(lowest, highest, logarithmic) of an axis; ``log`` allows that where positive numbers span over two decades."""
    low, high = min(numbers), max(numbers)
    if from_zero:
        return 0.0, (high or 1.0) * 1.04, False
    if log and low > 0 and high / low > 100:
        return low / 1.15, high * 1.15, True
    if high - low <= max(abs(low), abs(high)) * 1e-9 or high - low < 1e-290:  # as good as one value
        pad = max(abs(high) * 0.1, 1e-280) if high else 1.0
        return low - pad, high + pad, False
    pad = (high - low) * 0.06
    return (0.0 if 0 <= low < high * 0.35 else low - pad), high + pad, False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Ticks in one unit, with the digits that tell them apart: ``0.02``, ``1.5k``."""
    if len(values) < 2:
        return [number(value) for value in values]
    step, size = abs(values[1] - values[0]), max(map(abs, values))
    if size < 1e-3:
        return [f"{value:.2g}" for value in values]
    factor, unit = next(((f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if size >= f), (1.0, ""))
    factor = 1e3 if unit == "k" else factor
    digits = max(0, -math.floor(math.log10(step / factor) + 1e-9))
    return [f"{value / factor:.{digits}f}{unit}" if value else "0" for value in values]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between ``low`` and ``high``, at most six."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**power for power in powers[:: math.ceil(len(powers) / 6) or 1]]


def number(value: float) -> str:
    """A short text for any finite number: ``0.52``, ``1.3e-07``, ``18.2k``."""
    size = abs(value)
    if size >= 10_000:
        return ("-" if value < 0 else "") + compact(size)
    if size and size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"
