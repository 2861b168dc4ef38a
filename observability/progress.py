"""What a person sees while a run goes on: a live display in a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, Protocol, TextIO

from observability.formats import BLOCKS, compact, duration, time_split
from observability.history import History

Mode = Literal["auto", "live", "plain", "off"]

PLAIN_SECONDS = 2.0  # least time between two lines of steps, so that quick steps do not flood a log


class Display(Protocol):
    """One way to show progress."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Shows start-up phases, then steps, and keeps the ``History`` that ``summary_line`` sums up.

    ``mode`` auto is live when ``stream`` (stdout) is a terminal, plain otherwise. Steps count from 0 and are shown from
    1; ``total_steps`` is the last one's shown number. Use it as a context manager: leaving restores the terminal.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self.history = History()
        self.mode: Mode = choose_mode(mode, stream)
        self._display = self._open(total_steps, stream, clock)

    def _open(self, total_steps: int, stream: TextIO, clock: Callable[[], float]) -> Display:
        if self.mode == "off":
            return NoDisplay()
        if self.mode == "live":
            from observability.live import LiveDisplay  # rich takes a tenth of a second to import

            return LiveDisplay(total_steps, self.history, stream, clock)
        return PlainDisplay(total_steps, self.history, stream, clock)

    def phase(self, text: str) -> None:
        """What the run is busy with before its first step or after its last: ``starting the rollout worker``."""
        self._display.phase(text)

    def note(self, text: str) -> None:
        """A line that stays, above the live display."""
        self._display.note(text)

    def banner(self, facts: Mapping[str, object]) -> None:
        """What the run runs on, one fact a line; a name with underscores is shown with spaces."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.note(f"  {name.replace('_', ' '):<{width}}  {value}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number ``step`` (from 0) has finished, with all its metrics."""
        self.history.add(step, metrics)
        self._display.step(step, metrics)

    def close(self) -> None:
        """End the display; what it showed last stays. May be called twice."""
        self._display.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class NoDisplay:
    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines: every phase and note, the first and last step, and between them one every ``PLAIN_SECONDS`` at most."""

    def __init__(self, total_steps: int, history: History, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._history = history
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last_line: float | None = None
        self._gone = False  # nobody reads any more

    def phase(self, text: str) -> None:
        self._print(f"[{self._clock() - self._start:5.1f} s] {text}")

    def note(self, text: str) -> None:
        self._print(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        if self._last_line is None or step + 1 >= self._total or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            self._print(step_line(step, self._total, metrics, self._history))

    def close(self) -> None: ...  # every line was flushed

    def _print(self, text: str) -> None:
        if self._gone:
            return
        encoding = self._stream.encoding or "utf-8"  # a log under the C locale must not end the run over an ellipsis
        try:
            self._stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:  # the reader of the pipe or the terminal went away: the run itself goes on
            self._gone = True


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], history: History) -> str:
    """``step  12/150 | reward 0.412 | length 3.1 | 18.2k tokens/s | 0.34 s: rollout 61%, train 30% | 0:47 left``."""
    number = f"step {step + 1:>{len(str(total_steps))}}/{total_steps}"
    fields = [number]
    if "rollout/raw_reward" in metrics:
        fields.append(f"reward {metrics['rollout/raw_reward']:.3f}")
    if "rollout/response_len/mean" in metrics:
        fields.append(f"length {metrics['rollout/response_len/mean']:.1f}")
    if "perf/tokens_per_second" in metrics:
        fields.append(f"{compact(metrics['perf/tokens_per_second'])} tokens/s")
    if "perf/step_time" in metrics:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in time_split(metrics))
        fields.append(f"{metrics['perf/step_time']:.2f} s" + (f": {parts}" if parts else ""))
    left = seconds_left(step, total_steps, history)
    if left:
        fields.append(f"{duration(left)} left")
    return " | ".join(fields)


def seconds_left(step: int, total_steps: int, history: History) -> float | None:
    per_step = history.seconds_per_step()
    return None if per_step is None else max(0, total_steps - step - 1) * per_step


def choose_mode(mode: Mode, stream: TextIO) -> Mode:
    """What ``auto`` means for ``stream``; also ``plain`` for a live display whose characters it cannot show."""
    if mode in ("plain", "off"):
        return mode
    try:
        BLOCKS.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return "plain"
    # A CI service may offer a terminal, but its log keeps every frame of a live display.
    terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not os.environ.get("CI")
    return "live" if terminal or mode == "live" else "plain"
