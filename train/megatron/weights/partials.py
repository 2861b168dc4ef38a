"""Directories beside a model's own that hold it while it is written: kept by a lock, and removed where a kill left one.

``.NAME.PID-XXXXXXXX.partial`` is what is being written, ``.NAME.PID.before`` the model that it is to replace. The lock
is the kernel's and ends with the process, so that neither another host's process ids nor reused ones matter; a file
system without such locks has nothing that could be told from what is in use, and nothing is removed there.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def partial_name(target: Path) -> str:
    """A name of its own for what will be ``target``."""
    return f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def make_partial(target: Path) -> tuple[Path, int]:
    """The directory to write in, which is there, and the descriptor that says so until it is closed. Raises OSError."""
    path = target.with_name(partial_name(target))
    unlocked = path.with_suffix(".new")  # under the name that is looked for it is never seen unlocked
    unlocked.mkdir(parents=True)
    descriptor = lock(unlocked)
    unlocked.rename(path)
    return path, descriptor


def lock(directory: Path) -> int:
    """The descriptor that keeps a directory from being taken for a dead process's."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def before_name(target: Path) -> Path:
    """Where the model that ``target`` is now is put aside."""
    return target.with_name(f".{target.name}.{os.getpid()}.before")


def remove_leftovers(target: str | Path) -> list[str]:
    """Remove what killed processes of this user left of exports to ``target``; a line for each."""
    path = Path(target).absolute()
    removed = [f"removed {left}, of an export to {target} that was killed" for left in _removed(path, "partial")]
    if path.exists():  # else it is all that is left of a model
        removed += [f"removed {left}, which {target} had replaced" for left in _removed(path, "before")]
    return removed


def _removed(target: Path, kind: str) -> Iterator[str]:
    for left in sorted(target.parent.glob(f".{glob.escape(target.name)}.*.{kind}")):
        with contextlib.suppress(OSError):  # in use, another user's, or gone by now
            if left.is_symlink() or left.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
                yield left.name
            finally:
                os.close(descriptor)
