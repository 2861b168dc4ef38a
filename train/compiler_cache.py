"""Where torch's compiler keeps what it compiles, in the process of a role."""

from __future__ import annotations

import os
from pathlib import Path


def keep_compiler_cache_private() -> None:
    """Point TORCHINDUCTOR_CACHE_DIR into the user's cache directory, unless it is set or that cannot be written.

    torch makes this directory, and would run code that it finds there, as soon as an optimizer is made. Its own default
    is a name in the directory for temporary files that any user of the machine can take first.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
    directory = home / "accelrl" / "torchinductor"
    if not directory.is_absolute():  # no home directory, or a relative setting, which the XDG rules say to ignore
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home directory that is read-only or full: torch's default then
        return
    if os.access(directory, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
