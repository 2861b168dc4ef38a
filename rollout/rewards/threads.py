"""Daemon threads for calls that may never return.

``concurrent.futures`` joins its threads when the interpreter exits, so one hanging reward function would keep a
finished run from ending. These threads are daemons, and a caller that stops waiting leaves its thread behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class Ended(RuntimeError):
    """A call raised ``error``, which would end its task's event loop (SystemExit) or which a future refuses."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the call raised {error!r}")
        self.error = error


class DaemonThreads:
    """Runs blocking calls off the event loop. It starts a thread whenever none is idle: the caller bounds how many."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a job, less the jobs already queued for them
        self._started = 0
        self._closed = False

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call ``function`` in a thread, in the caller's context. Cancelling stops the waiting, not the call."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._started += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        self._jobs.put((lambda: context.run(function, *args, **kwargs), future, loop))
        return await future

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future, loop = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001 - handed to the awaiting coroutine, which raises it
                error = raised
            with self._lock:
                if self._closed:
                    _deliver(loop, future, result, error)
                    return
                self._idle += 1  # before the result is out, so that the caller's next call finds this thread
            _deliver(loop, future, result, error)
            del job, call, future, loop, result, error  # an idle thread keeps no sample alive


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # a future refuses StopIteration; SystemExit in a task would end the whole event loop
            ended = Ended(error)
            ended.__cause__ = error
            future.set_exception(ended)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop was closed while the call ran on: shutdown, nobody waits
        return
