"""Numbers as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"

PARTS = (  # metric of a part of the step, and its name in the display
    ("perf/rollout_time", "rollout"),
    ("perf/train_time", "train"),
    ("perf/update_weights_time", "weights"),
)


def duration(seconds: float) -> str:
    """``8.2 s``, ``3:05`` (minutes), ``2:03:05`` (hours)."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def compact(number: float) -> str:
    """``950``, ``18.2k``, ``1.3M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.99995:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def sparkline(values: Sequence[float]) -> str:
    """One block character a value, scaled from the smallest to the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return BLOCKS[0] * len(values)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / (high - low) * top)] for value in values)


def time_split(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(part, share of the step's time); ``other`` is what the known parts leave, when that is at least 1 %."""
    step = metrics.get("perf/step_time", 0.0)
    if not step > 0:
        return []
    shares = [(name, metrics[key] / step) for key, name in PARTS if key in metrics]
    other = 1.0 - sum(share for _, share in shares)
    return [*shares, ("other", other)] if other >= 0.01 else shares
