"""A tracker that a slow or absent service cannot hold up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from observability.trackers import Tracker

_END = None


class BackgroundTracker:
    """Opens another tracker on a thread of its own and hands it everything there.

    ``log`` never waits. An error of the tracker ends it, not the run: ``notify`` is told once, with ``name`` in front,
    and later steps are dropped. ``close`` waits up to ``close_seconds`` for what is queued, then says so.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        notify: Callable[[str], None],
        *,
        close_seconds: float = 30.0,
    ) -> None:
        self._name = name
        self._open = open_tracker
        self._notify = notify
        self._close_seconds = close_seconds
        self._steps: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._failed.is_set():
            self._steps.put((step, dict(metrics)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._steps.put(_END)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._notify(f"{self._name}: not finished after {self._close_seconds:g} s; the run ends without it")

    def _run(self) -> None:
        try:
            tracker = self._open()
            try:
                while (item := self._steps.get()) is not _END:
                    tracker.log(*item)
            finally:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises; said aloud
            self._failed.set()
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self._notify(f"{self._name}: stopped: {reason}; the run goes on without it, metrics.jsonl has every step")
