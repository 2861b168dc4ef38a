"""Ports for servers of this machine that are still to be started: chosen once, and no other run's until given back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rollout.engines.errors import EngineError

FIRST, LAST = 20000, 32000  # below what Linux hands to outgoing connections (32768 and up), where it says nothing else
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortLease:
    """Ports held for this process. A server binds its port long after it was told it, so a port is held by a lock.

    The lock is the kernel's, on a file per port in a directory of this user: it ends with the process however that
    ends. Ports that anybody listens on are passed over, and so is the range that outgoing connections take theirs from.
    """

    def __init__(self) -> None:
        self._held: dict[int, IO[str]] = {}

    def take(self, host: str = "127.0.0.1") -> int:
        """A port that nobody holds and that can be bound on ``host`` now. EngineError when there is none."""
        for port in _candidates():
            if port in self._held:
                continue
            lock = _locked(port)
            if lock is None:
                continue
            if is_free(host, port):
                self._held[port] = lock
                return port
            lock.close()
        raise EngineError(f"no port from {FIRST} to {LAST} is free on {host}: other servers hold them all")

    def give_back(self, port: int) -> None:
        """Let another have ``port``; one that is not held is no error."""
        lock = self._held.pop(port, None)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        for port in list(self._held):
            self.give_back(port)


def _candidates() -> Iterator[int]:
    """Every port of the range once, from a random one on."""
    first, last = FIRST, LAST
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, _EPHEMERAL.read_text().split())
        if (
            low <= last and high >= first
        ):  # this machine's connections use our range: take the larger rest below or above
            first, last = (10000, low - 1) if low - 10000 > 65535 - high else (high + 1, 65535)
    count = last - first + 1
    start = random.Random(os.urandom(8)).randrange(count)
    return (first + (start + step) % count for step in range(count))


def _lock_directory() -> Path:
    """Ours alone: everybody may write beside it, and could have been there first."""
    directory = Path(tempfile.gettempdir()) / f"accelrl-ports-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise EngineError(f"{directory}, where ports are held, cannot be made: {error.strerror}; set TMPDIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise EngineError(
            f"{directory}, where ports are held, is no directory that only this user writes to; remove it, or set "
            "TMPDIR to a directory of your own"
        )
    return directory


def _locked(port: int) -> IO[str] | None:
    place = _lock_directory() / str(port)
    try:
        number = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EngineError(f"{place}, which holds a port, cannot be written: {error.strerror}; set TMPDIR") from error
    file = os.fdopen(number, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_free(host: str, port: int) -> bool:
    """Whether ``port`` can be bound on ``host`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without SO_REUSEADDR: a port whose last connection has only just ended would be free for some servers alone.
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
