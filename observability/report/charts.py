"""Charts as inline SVG: no scripts, no libraries, colours from the page's style, light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from observability.report.axes import Scale, limits, log_ticks, number, tick_texts, ticks

WIDTH, HEIGHT = 480.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 10.0, 12.0, 24.0
MARKED = 20  # points of a curve, up to which each gets a dot
COLUMNS = 160  # of a chart; above that, neighbouring steps are merged

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve; ``values`` may hold nan, which leaves a gap. ``low`` and ``high``, as long, are drawn as a band."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over the training steps. ``stacked`` draws the lines as areas on top of each other."""

    title: str
    about: str
    lines: Sequence[Line]
    stacked: bool = False
    percent: bool = False
    log: bool = False  # where the values span decades
    nonfinite: dict[int, str] = field(default_factory=dict)


def merge(line: Line, columns: int = COLUMNS) -> Line:
    """At most ``columns`` points: means of neighbours, with a band from the smallest to the largest of them."""
    count = len(line.steps)
    if count <= columns:
        return line
    size = math.ceil(count / columns)
    steps, values, low, high = [], [], [], []
    for start in range(0, count, size):
        part = slice(start, start + size)
        finite = [value for value in line.values[part] if math.isfinite(value)]
        steps.append(sum(line.steps[part]) / len(line.steps[part]))
        values.append(sum(finite) / len(finite) if finite else math.nan)
        lows = [v for v in (line.low or line.values)[part] if math.isfinite(v)]
        highs = [v for v in (line.high or line.values)[part] if math.isfinite(v)]
        low.append(min(lows, default=math.nan))
        high.append(max(highs, default=math.nan))
    return Line(line.label, steps, values, low, high)


def smooth(values: Sequence[float]) -> list[float]:
    """Means over a centred window of a sixth of the curve, nearer values weighing more; nan stays nan."""
    reach = max(1, len(values) // 12)
    out = []
    for place, value in enumerate(values):
        first = max(0, place - reach)
        near = [(reach + 1 - abs(first + i - place), v) for i, v in enumerate(values[first : place + reach + 1])]
        weighted = [(weight, v) for weight, v in near if math.isfinite(v)]
        total = sum(weight for weight, _ in weighted)
        out.append(sum(weight * v for weight, v in weighted) / total if math.isfinite(value) else math.nan)
    return out


def svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element."""
    lines = [_drawable(merge(line)) for line in chart.lines]
    if chart.stacked:
        lines = stack(lines)
    numbers = [v for line in lines for v in _extent(line) if math.isfinite(v)]
    steps = [*chart.nonfinite, *(end for line in chart.lines for end in (line.steps[0], line.steps[-1]))]
    if not numbers:
        return f'<svg viewBox="0 0 {WIDTH:g} 60" role="img"><text x="{LEFT:g}" y="34">no finite value</text></svg>'
    low, high, log = limits(numbers, from_zero=chart.stacked, log=chart.log)
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, log)
    parts = [_grid(x, y, chart.percent)]
    for place, line in enumerate(lines):
        if chart.stacked:
            parts.append(_areas(line, lines[place - 1] if place else None, x, y, place))
        else:
            merged = len(line.steps) < len(chart.lines[place].steps)
            parts.append(_curve(line, x, y, place, smoothed=len(lines) == 1 and not merged))
    parts.append(_marks(chart.nonfinite, x))
    parts.append(_hover(chart, x))
    label = escape(f"{chart.title} over the steps {min(steps):g} to {max(steps):g}")
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _drawable(line: Line) -> Line:
    """Values beyond 1e300 at 1e300: the arithmetic of axes would overflow."""

    def bounded(values: Sequence[float]) -> list[float]:
        return [min(max(value, -1e300), 1e300) if math.isfinite(value) else value for value in values]

    low = None if line.low is None else bounded(line.low)
    high = None if line.high is None else bounded(line.high)
    return Line(line.label, line.steps, bounded(line.values), low, high)


def stack(lines: Sequence[Line]) -> list[Line]:
    """Each line added to the ones before it. All lines have the same steps; nan counts as nothing."""
    out: list[Line] = []
    total = [0.0] * max(len(line.steps) for line in lines)
    for line in lines:
        total = [t + (v if math.isfinite(v) else 0.0) for t, v in zip(total, line.values, strict=True)]
        out.append(Line(line.label, line.steps, total))
    return out


def _extent(line: Line) -> Iterable[float]:
    yield from line.values
    yield from line.low or ()
    yield from line.high or ()


def _grid(x: Scale, y: Scale, percent: bool) -> str:
    parts = []
    values = log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high)
    texts = [number(value) for value in values] if y.log else tick_texts([v * 100 if percent else v for v in values])
    for value, text in zip(values, texts, strict=True):
        at = y(value)
        parts.append(f'<path class="grid" d="M{LEFT:g} {at:.1f}H{WIDTH - RIGHT:g}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6:g}" y="{at + 4:.1f}">{text}{"%" if percent else ""}</text>')
    whole = [value for value in ticks(x.low, x.high, 6) if value == int(value)]
    for value, text in zip(whole, tick_texts(whole), strict=True):
        parts.append(f'<text class="x" x="{x(value):.1f}" y="{HEIGHT - 6:g}">{text}</text>')
    return "".join(parts)


def _curve(line: Line, x: Scale, y: Scale, colour: int, *, smoothed: bool) -> str:
    place = f"c{colour % 8}"
    parts = []
    if line.low is not None and line.high is not None:
        parts.append(_band(line.steps, line.low, line.high, x, y, place))
    if smoothed and len(line.steps) >= 24:
        parts.append(_path(line.steps, line.values, x, y, f"line faint {place}"))
        parts.append(_path(line.steps, smooth(line.values), x, y, f"line {place}"))
    else:
        parts.append(_path(line.steps, line.values, x, y, f"line {place}"))
        if len(line.steps) <= MARKED:
            parts.append(_dots(line, x, y, place))
    return "".join(parts)


def _areas(line: Line, below: Line | None, x: Scale, y: Scale, colour: int) -> str:
    floor = below.values if below else [0.0] * len(line.steps)
    return _band(line.steps, floor, line.values, x, y, f"full c{colour % 8}")


def _path(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale, style: str) -> str:
    parts = []
    for run in _runs(steps, values):
        points = [f"{x(step):.1f} {y(value):.1f}" for step, value in run]
        alone = "h.01" if len(points) == 1 else ""  # too short to see but for its round ends
        parts.append("M" + "L".join(points) + alone)
    return f'<path class="{style}" d="{"".join(parts)}"/>'


def _dots(line: Line, x: Scale, y: Scale, place: str) -> str:
    points = (f"M{x(s):.1f} {y(v):.1f}h.01" for s, v in zip(line.steps, line.values, strict=True) if math.isfinite(v))
    return f'<path class="dots {place}" d="{"".join(points)}"/>'


def _band(steps: Sequence[float], low: Sequence[float], high: Sequence[float], x: Scale, y: Scale, style: str) -> str:
    parts = []
    both = [lo if math.isfinite(lo) and math.isfinite(hi) else math.nan for lo, hi in zip(low, high, strict=True)]
    top = dict(zip(steps, high, strict=True))
    for run in _runs(steps, both):
        upper = "L".join(f"{x(step):.1f} {y(top[step]):.1f}" for step, _ in run)
        lower = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in reversed(run))
        parts.append(f"M{upper}L{lower}Z")
    return f'<path class="band {style}" d="{"".join(parts)}"/>'


def _runs(steps: Sequence[float], values: Sequence[float]) -> list[list[Point]]:
    """The pieces of a curve between its gaps."""
    pieces: list[list[Point]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _marks(nonfinite: dict[int, str], x: Scale) -> str:
    shown = list(nonfinite.items())[:200]
    return "".join(
        f'<path class="bad" d="M{x(step):.1f} {TOP:g}V{HEIGHT - BOTTOM:g}">'
        f"<title>step {step}: {escape(was)}</title></path>"
        for step, was in shown
    )


def _hover(chart: Chart, x: Scale) -> str:
    """A strip for each point that shows its numbers when pointed at (a ``<title>``; there are no scripts)."""
    lines = [merge(line) for line in chart.lines]
    values: dict[float, list[str]] = {}
    for line in lines:
        for step, value in zip(line.steps, line.values, strict=True):
            if math.isfinite(value):
                shown = f"{value:.1%}" if chart.percent else number(value)
                values.setdefault(step, []).append(f"{line.label} {shown}")
    steps = sorted(values)
    edges = [x.start, *(x((a + b) / 2) for a, b in pairwise(steps)), x.end]
    merged = any(len(line.steps) > COLUMNS for line in chart.lines)
    strips = []
    for step, left, right in zip(steps, edges, edges[1:], strict=False):
        text = escape(f"{'around step' if merged else 'step'} {step:.0f}: {', '.join(values[step])}")
        strips.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP:g}" width="{right - left:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM:g}"><title>{text}</title></rect>'
        )
    return "".join(strips)
