"""The loop, the same for every launcher: roll out, train, hand the new weights over, say what happened."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from observability import History, Progress, Tracker


class Runtime(Protocol):
    """Where the workers live: in this process (``train.inline``) or on a Ray cluster (``train.cluster``)."""

    def start(self) -> None:
        """Bring up rollout worker and trainers and hand over the first weights."""
        ...

    def step(self, rollout_id: int) -> dict[str, float]:
        """One rollout, the training on it, and the hand-over of the new weights; returns its metrics."""
        ...

    def save_hf(self, directory: Path) -> None: ...

    def close(self) -> None: ...


@dataclass
class StopRequest:
    """Set by the first Ctrl-C: finish the step under way, then stop."""

    requested: bool = False


def run_loop(runtime: Runtime, *, num_rollout: int, tracker: Tracker, progress: Progress, stop: StopRequest) -> History:
    """Train for ``num_rollout`` steps, or until ``stop`` is requested; returns what was logged."""
    for rollout_id in range(num_rollout):
        if stop.requested:
            break
        started = time.perf_counter()
        metrics = runtime.step(rollout_id)
        seconds = time.perf_counter() - started
        metrics["perf/step_time"] = seconds
        metrics["perf/tokens_per_second"] = metrics.get("rollout/response_tokens", 0.0) / seconds
        tracker.log(rollout_id, metrics)
        progress.step(rollout_id, metrics)
    return progress.history


@contextmanager
def stop_on_interrupt(stop: StopRequest) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM) asks for a stop after the current step; a second one interrupts at once."""

    def handle(signum: int, _frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        name = signal.Signals(signum).name
        print(f"\n{name}: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    previous = {sig: signal.signal(sig, handle) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)
