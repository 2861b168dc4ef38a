"""Directories of a run's own: made, held by one run at a time, and taken away again when the run never starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO

from samples.errors import InputError

LOCK_FILE = ".lock"
SAVE_LOCK_FILE = ".lock-save"
EXAMPLE = "example"  # where the built-in example's model and prompts are written


class HeldDirectory:
    """``path``, made where it was missing and locked until ``release``; raises InputError where another run holds it.

    The lock is the kernel's (``flock``), so it ends with the process however that ends, and a child process does not
    inherit it. On a file system without locks the run goes on without one. ``flag`` is what gave the directory.
    """

    def __init__(self, path: Path, flag: str, lock_file: str) -> None:
        self._made = _make(path, flag)
        self.path = path.resolve()
        self._lock_path = self.path / lock_file
        try:
            self._lock: IO[str] | None = _locked(self._lock_path, flag)
        except BaseException:
            self._remove_made()
            raise

    def release(self) -> None:
        """Let another run have the directory; may be called twice."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            self._lock_path.unlink()  # while it is held, so that it cannot be a later run's
        lock.close()

    def discard(self) -> None:
        """Release it, and remove what was made for a run that does not start."""
        self.release()
        self._remove_made()

    def _remove_made(self) -> None:
        with contextlib.suppress(OSError):  # something else is in there by now
            for path in self._made:
                path.rmdir()


class SaveDirectory(HeldDirectory):
    """``--save``, which may be an output directory too: its lock is a file of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "--save", SAVE_LOCK_FILE)

    def release(self) -> None:
        """Let another run save there; it goes where this one made it and saved nothing."""
        super().release()
        self._remove_made()


class RunDirectory(HeldDirectory):
    """``--output-dir``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "--output-dir", LOCK_FILE)
        self._new_example = not (self.path / EXAMPLE).exists()

    @classmethod
    def new(cls, parent: Path, name: str) -> RunDirectory:
        """A directory of this name, or ``name-2`` and so on, that no one else has made."""
        made = _make(parent, "--output-dir")
        number, path = 1, parent / name
        while True:
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                path = parent / f"{name}-{number}"
            except OSError as error:
                raise _not_created(path, "--output-dir", error) from error
            else:
                break
        directory = cls(path)
        directory._made = [path.absolute(), *made]
        return directory

    def discard(self) -> None:
        """Release it, and remove what was made for a run that does not start."""
        if self._new_example and self._lock is not None:
            shutil.rmtree(self.path / EXAMPLE, ignore_errors=True)
        super().discard()


def new_name(name: str) -> str:
    """``<time>-<name>``, with nothing in it that a directory's name should not hold."""
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def _make(path: Path, flag: str) -> list[Path]:
    """Make a directory and its parents; those that were missing, innermost first."""
    try:
        missing = [part for part in (path.absolute(), *path.absolute().parents) if not part.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_created(path, flag, error) from error
    return missing


def _locked(file_path: Path, flag: str) -> IO[str] | None:
    path = file_path.parent
    while True:
        try:
            file = os.fdopen(os.open(file_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        except OSError as error:
            raise InputError(f"{flag} {path} cannot be written to: {error.strerror}; give a writable place") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read().strip()
            file.close()
            raise InputError(
                f"{flag} {path} is in use by another run{f' (process {pid})' if pid else ''}; wait until it "
                "ends, or give another directory"
            ) from None
        except OSError as error:
            file.close()
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            raise
        if _is_still(file, file_path):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
        file.close()  # the run that held it ended between our open and our lock, and took the file away


def _is_still(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _not_created(path: Path, flag: str, error: OSError) -> InputError:
    return InputError(f"{flag} {path} cannot be created: {error.strerror}; choose a writable place")
