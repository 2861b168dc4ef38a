"""Files and directories that belong to a living process, told from those that a killed one left by a lock on them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

PREFIX = "accelrl-weights-"
_UNNAMED = 60.0  # seconds after which what has no lock and not yet its name is nobody's


def held_file(parent: Path) -> tuple[Path, int]:
    """A new file of this user's alone, and its descriptor, which locks it until it is closed or the process ends."""
    unlocked = parent / f".{new_name()}"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return _locked(unlocked, descriptor), descriptor


def held_directory(parent: Path) -> tuple[Path, int]:
    """The same for a directory, which others may read."""
    unlocked = parent / f".{new_name()}"
    unlocked.mkdir(mode=0o755)
    descriptor = os.open(unlocked, os.O_RDONLY | os.O_CLOEXEC)
    return _locked(unlocked, descriptor), descriptor


def _locked(unlocked: Path, descriptor: int) -> Path:
    """Under the name that ``sweep`` looks for it is never seen unlocked."""
    with contextlib.suppress(OSError):  # a file system without locks has nothing that could be swept either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path = unlocked.with_name(unlocked.name[1:])
    unlocked.rename(path)
    return path


def new_name() -> str:
    return f"{PREFIX}{secrets.token_hex(8)}"


def sweep(parent: Path) -> None:
    """Remove from ``parent`` what killed processes of this user left: names of ours whose lock nobody holds."""
    for path in (*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")):
        with contextlib.suppress(OSError):  # another process sweeps too, or it is none of ours
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if path.name.startswith(".") and time.time() - found.st_mtime < _UNNAMED:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)
