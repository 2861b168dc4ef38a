"""An asyncio loop on a thread of its own, so that plain code can run coroutines and keep engines alive in between."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from samples.errors import RunError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EventLoopThread:
    """Owns one event loop; ``run`` blocks the calling thread until a coroutine on it is done."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the waiting thread must not leave the coroutine running behind its back.
            future.cancel()
            raise

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as error:
                # Of code that a coroutine called: its task has the error, and whoever awaits that is still to get it.
                logger.warning("%r was raised in a coroutine", error)

    def check_free(self, seconds: float = 10.0) -> None:
        """Raises RunError, naming the place in the code, when something has held the loop up for that long."""
        free = threading.Event()
        self._loop.call_soon_threadsafe(free.set)
        if free.wait(seconds):
            return
        frame = sys._current_frames().get(self._thread.ident or 0)
        place = "" if frame is None else f": it is in {frame.f_code.co_filename} line {frame.f_lineno}"
        raise RunError(
            f"the rollout could not be closed: a function that it called has not returned for {seconds:g} s{place}"
        )

    def close(self, timeout: float = 10.0) -> None:
        """Cancel what still runs, stop the loop and join its thread; raises when the thread does not end in time."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the event loop thread {self._thread.name!r} did not end within {timeout:g} s")
        self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
