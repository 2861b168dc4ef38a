"""The Ray cluster that a run starts for itself: on the loopback interface, and closed to everyone else.

Left to itself Ray keeps its sockets, logs and spilled objects in ``/tmp/ray``, which every user of the machine may
write to, and the token that its processes show each other in the home directory. Here both belong to the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from samples.errors import InputError

# A path of a Unix socket has 107 bytes on Linux and 103 on macOS; Ray's own part of it,
# session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store, takes up to 64.
_LONGEST_DIRECTORY = (103 if sys.platform == "darwin" else 107) - 64
_INSIDE = "r"  # Ray opens its own directory to every user, so the one that is closed is the one around it
_PREFIX = "accelrl-"
_LOCK = ".lock"
_OWN: dict[Path, int] = {}  # directories of this process, and the descriptors that hold their locks
_END_TIMEOUT = 10.0  # seconds
_REMOVAL_TRIES, _REMOVAL_PAUSE = 20, 0.25


class LocalRay:
    """Ray on this machine, for this process; ``start`` once, then ``stop``."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def start(self, options: dict[str, Any]) -> None:
        """``ray.init`` with ``options``, listening on loopback only."""
        prepare_environment()
        import ray

        self._directory = private_directory()
        with interrupts_held_back(), sigterm_blocked():  # what half a cluster has started, Ray ends only as we exit
            ray.init(**options, _temp_dir=str(self._directory / _INSIDE))

    def stop(self, keep_logs: Path | None = None) -> None:
        """End Ray and remove what it kept; its logs are copied to ``keep_logs`` as far as they can be."""
        import ray

        _end_without_asking()
        agents = _started_by_ray() if self._directory is not None else []
        ray.shutdown()
        _end(agents)
        directory, self._directory = self._directory, None
        if directory is None:
            return
        if keep_logs is not None:
            logs = (directory / _INSIDE / "session_latest").resolve() / "logs"
            with contextlib.suppress(OSError):  # a full disk may be why they are wanted; what did fit is there
                shutil.copytree(logs, keep_logs, ignore_dangling_symlinks=True, dirs_exist_ok=True)
        for _ in range(_REMOVAL_TRIES):  # a worker that is just ending may still write
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                os.close(_OWN.pop(directory))
                return
            time.sleep(_REMOVAL_PAUSE)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A first Ctrl-C or SIGTERM takes effect when the block has ended, a second one at once."""
    held: list[int] = []
    handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)
        for each, handler in handlers.items():
            signal.signal(each, handler)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Processes started in the block never get SIGTERM: it is inherited. Ray itself does so with SIGINT.

    Many senders (systemd, Slurm, ``timeout``, ``kill -- -GROUP``) send it to all processes of a job at once, and the
    last step is to be finished and saved with Ray still there. ``stop`` ends Ray with SIGKILL.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_without_asking() -> None:
    """Have Ray kill its processes at once: it would wait a second for each to act on a SIGTERM that is blocked."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return
    kill = node.kill_all_processes
    node.kill_all_processes = lambda **options: kill(**options | {"allow_graceful": False})


def _started_by_ray() -> list[psutil.Process]:
    """What the processes of this run's Ray have started: workers, and agents that outlive them by up to minutes."""
    from ray._private import worker

    node = worker._global_node
    found: list[psutil.Process] = []
    for running in node.all_processes.values() if node is not None else ():
        for info in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(info.process.pid).children()
    return found


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # also where the number is another process's by now
            process.kill()
    psutil.wait_procs(processes, timeout=_END_TIMEOUT)


def prepare_environment() -> None:
    """Close the cluster to others; Ray reads these variables when it is imported, so this comes before that."""
    loopback_interface()
    # The only switch by which Ray keeps a one-machine cluster on the loopback interface; despite its name it is
    # read on every platform.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    _require_token()


def private_directory() -> Path:
    """A new directory for temporary files that only this user can enter, with a path short enough for Ray's sockets.

    It is in ``TMPDIR``, or in ``/tmp`` where that is too long.
    """
    for parent in (tempfile.gettempdir(), "/tmp"):
        sweep(Path(parent))
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError:
            continue
        if len(os.fsencode(directory / _INSIDE)) <= _LONGEST_DIRECTORY:
            _OWN[directory] = _hold(directory)
            return directory
        directory.rmdir()
    raise InputError(
        f"TMPDIR {tempfile.gettempdir()} is too long for Ray's sockets or cannot be written, and neither can /tmp; set "
        f"TMPDIR to a writable directory of at most {_LONGEST_DIRECTORY - len('/accelrl-12345678/r')} bytes"
    )


def sweep(parent: Path) -> None:
    """Remove the directories in ``parent`` that killed runs of this user left: those whose lock nobody holds."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another run sweeps too, or it is none of ours
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(directory / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def _hold(directory: Path) -> int:
    """Lock a new directory against ``sweep`` for as long as this process lives; the file appears already locked."""
    unnamed = directory / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks has nothing that could be swept either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(directory / _LOCK)
    return descriptor


def loopback_interface() -> str:
    """The loopback interface's name ("lo" on Linux, "lo0" on macOS)."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            return name
    raise InputError("this machine has no loopback network interface (lo): Ray and gloo cannot run on it")


def _require_token() -> None:
    # Other users reach the loopback interface too. Ray would write a token of its own into the home directory.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "disabled":
        return
    if not os.environ.get("RAY_AUTH_TOKEN_PATH") and not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
