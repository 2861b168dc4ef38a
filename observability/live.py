"""The live display: a few lines at the bottom of a terminal, redrawn in place by rich."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from observability.formats import compact, duration, sparkline, time_split
from observability.history import History

BAR_WIDTH = 40
COLOURS = {"rollout": "cyan", "train": "magenta", "weights": "yellow", "other": "bright_black"}


class LiveDisplay:
    """Start-up phases with a spinner, then reward curve, lengths, speed and where the time goes.

    rich redraws four times a second from a thread of its own; what it reads is replaced whole, never changed in place.
    """

    def __init__(self, total_steps: int, history: History, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._history = history
        self._clock = clock
        self._phase: tuple[str, float] | None = None  # text and when it began
        self._latest: tuple[int, Mapping[str, float]] | None = None
        self._spinner = Spinner("dots")
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, get_renderable=self._frame, refresh_per_second=4)
        self._live.start()

    def phase(self, text: str) -> None:
        self._end_phase()
        self._phase = (text, self._clock())
        self._live.refresh()

    def _end_phase(self) -> None:
        if self._phase is not None:
            text, began = self._phase
            self._phase = None
            self._console.print(Text.assemble((f"{text} ", "dim"), (f"({duration(self._clock() - began)})", "dim")))

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._end_phase()
        self._latest = (step, dict(metrics))

    def close(self) -> None:
        self._end_phase()
        self._live.stop()  # draws the last frame, gives cursor and stdout back

    def _frame(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._latest is not None:
            lines.append(self._steps(*self._latest))
        if self._phase is not None:
            text, began = self._phase
            self._spinner.update(text=Text(f"{text} {duration(self._clock() - began)}"))
            lines.append(self._spinner)
        return Group(*lines)

    def _steps(self, step: int, metrics: Mapping[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        bar = ProgressBar(total=self._total, completed=min(step + 1, self._total), width=BAR_WIDTH)
        per_step = self._history.seconds_per_step() or 0.0
        left = max(0, self._total - step - 1) * per_step
        table.add_row("step", f"{step + 1}/{self._total}", bar)
        if "rollout/raw_reward" in metrics:
            curve = Text(sparkline(self._history.curve(BAR_WIDTH)), style="green")
            table.add_row("reward", f"{metrics['rollout/raw_reward']:.3f}", curve)
        if "rollout/response_len/mean" in metrics:
            longest = metrics.get("rollout/response_len/max")
            note = "" if longest is None else f"longest {longest:.0f}"
            table.add_row("length", f"{metrics['rollout/response_len/mean']:.1f}", Text(note, style="dim"))
        if "perf/tokens_per_second" in metrics:
            table.add_row("tokens/s", compact(metrics["perf/tokens_per_second"]), "")
        split = Text("  ").join(
            Text(f"{name} {share:.0%}", style=COLOURS.get(name, "")) for name, share in time_split(metrics)
        )
        table.add_row("time", f"{per_step:.2f} s/step", split)
        if left:
            table.add_row("left", duration(left), "")
        return table
