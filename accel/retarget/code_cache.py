"""Rewritten code objects on disk, so that a process start does not parse and compile some 175 modules again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import logging
import marshal
import os
import stat
import struct
import sys
import tempfile
from pathlib import Path
from types import CodeType

logger = logging.getLogger(__name__)

_STAMP = struct.Struct("<dQ")  # modification time in seconds, size in bytes, of the source file
_DIGEST_SIZE = 32

# A cache that cannot be read or written is done without. Other errors (EBADF, EINVAL, …) are faults of ours.
_DO_WITHOUT = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENAMETOOLONG,
        errno.ENFILE,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
    }
)


class CodeCache:
    """One file a module: source stamp, BLAKE2b digest, marshalled code. Renamed into place: readers see all or nothing.

    ``marshal`` trusts its input: the directory must belong to this user and be closed to others, else it is not used.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def for_user(cls, device_type: str, megatron_version: str) -> CodeCache:
        """The cache of this user, Python, rewriter, device and Megatron-Core; a directory of its own for each."""
        key = hashlib.blake2b(digest_size=16)
        for source in sorted(Path(__file__).parent.glob("*.py")):
            key.update(source.read_bytes())
        key.update(f"{device_type}|{megatron_version}|{sys.flags.optimize}".encode())
        key.update(importlib.util.MAGIC_NUMBER)
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        directory = Path(home, "accelrl", "retarget", f"{sys.implementation.cache_tag}-{key.hexdigest()}")
        if not directory.is_absolute():  # no home directory, or a relative setting, which the XDG rules say to ignore
            return cls(None)
        return cls(directory if _make_private(directory) else None)

    def load(self, module: str, path: str, stamp: tuple[float, int]) -> CodeType | None:
        """The code stored for this source file in this state; None when there is none that can be trusted."""
        if self._directory is None:
            return None
        try:
            descriptor = os.open(self._file(module, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                owner = os.fstat(descriptor).st_uid
                content = file.read()
        except OSError as error:
            _raise_unless_expected(error)
            return None
        head = _STAMP.size + _DIGEST_SIZE
        payload = content[head:]
        expected = _STAMP.pack(*stamp) + hashlib.blake2b(payload, digest_size=_DIGEST_SIZE).digest()
        if owner != os.getuid() or content[:head] != expected:
            return None
        code = marshal.loads(payload)
        return code if isinstance(code, CodeType) else None

    def store(self, module: str, path: str, stamp: tuple[float, int], code: CodeType) -> None:
        if self._directory is None or sys.dont_write_bytecode:
            return
        payload = marshal.dumps(code)
        digest = hashlib.blake2b(payload, digest_size=_DIGEST_SIZE).digest()
        temporary: str | None = None
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self._directory)
            with open(descriptor, "wb") as file:
                file.write(_STAMP.pack(*stamp) + digest + payload)
            os.replace(temporary, self._file(module, path))
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            _raise_unless_expected(error)
            logger.warning(
                "cannot keep rewritten modules in %s (%s): every start compiles them again", self._directory, error
            )
            self._directory = None

    def _file(self, module: str, path: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{hashlib.blake2b(f'{module}|{path}'.encode(), digest_size=16).hexdigest()}.code"


def _make_private(directory: Path) -> bool:
    """Create ``directory`` for this user alone; False, with a warning, where it is or must be somebody else's."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        _raise_unless_expected(error)
        logger.warning("no cache of rewritten modules in %s (%s): every start compiles them again", directory, error)
        return False
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return True
    logger.warning("%s is not a directory of yours alone (mode 0700): rewritten modules are not cached", directory)
    return False


def _raise_unless_expected(error: OSError) -> None:
    if error.errno not in _DO_WITHOUT:
        raise error
