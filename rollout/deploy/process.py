"""One server as a process of its own: started with a log file, waited for, watched, and ended with the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from rollout.engines.errors import EngineError

_SUPERVISE = Path(__file__).with_name("supervise.py")
_LAST_LINES = 15
_STOP_TIMEOUT = 25.0  # seconds; the supervisor itself needs up to twice its grace
_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds between two looks at a server that starts


class ServerProcess:
    """``command`` with ``environment`` added to this process's; its output goes to ``log``.

    It ends with this process, however that ends (see ``supervise.py``). EngineError where it cannot be started, or
    ends before it is ready: with its exit status and the last lines of its log.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"$ {' '.join(self.command)}\n".encode())
                log.flush()
                self._process = self._supervised(log)
        except OSError as error:
            raise EngineError(
                f"{self.name}: cannot be started with the log {self.log}: {error.strerror} (--sglang-log-dir says "
                "where logs are)"
            ) from error

    def _supervised(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISE), *self.command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | self._environment,
        )

    @property
    def status(self) -> int | None:
        """Of a process that has ended; None while it runs, and before."""
        return None if self._process is None else self._process.poll()

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]], timeout: float, flag: str) -> None:
        """Return once ``is_ready`` says so. ``flag`` is what sets the ``timeout``, in seconds."""
        await wait_until_ready(self, is_ready, timeout, flag)

    async def stop(self) -> None:
        """End it and what it started. EngineError when it does not end in time; may be called twice."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, _STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{self.name} (process {process.pid}) did not end within {_STOP_TIMEOUT:g} s") from None
        self._process = None

    def last_words(self) -> str:
        """The end of its log, as the tail of a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        shown = "\n  ".join(line for line in lines[-_LAST_LINES:] if line.strip())
        return f". The end of {self.log}:\n  {shown}"


class Ends(Protocol):
    """A process, wherever it runs."""

    name: str

    @property
    def alive(self) -> bool: ...

    @property
    def status(self) -> int | None: ...

    def last_words(self) -> str: ...


async def wait_until_ready(process: Ends, is_ready: Callable[[], Awaitable[bool]], timeout: float, flag: str) -> None:
    """EngineError when ``process`` ends first, or takes longer than ``timeout`` seconds, which ``flag`` sets."""
    deadline, pause = time.monotonic() + timeout, _FIRST_POLL
    while True:
        ready = await is_ready()
        if not process.alive:  # whatever answered then is not it
            status = process.status
            raise EngineError(f"{process.name} ended with status {status} before it was ready{process.last_words()}")
        if ready:
            return
        if time.monotonic() > deadline:
            raise EngineError(f"{process.name} was not ready within {timeout:g} s ({flag}){process.last_words()}")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL)
