"""What a MUSA user may ask to have imported before torch_musa: a patch set, or the vendor's CUDA wrapper.

``MUSA_PATCH_PATH`` names the directory that holds ``musa_patch``; ``ACCELRL_MUSA_ROUTE`` is ``hook`` (our import hook,
the default), ``musa_patch`` or ``torchada``. Nothing is imported unless one of them says so, and each at most once a
process.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path

from accel.errors import AcceleratorError

PATCH_PATH_ENV = "MUSA_PATCH_PATH"
ROUTE_ENV = "ACCELRL_MUSA_ROUTE"
ROUTES = ("hook", "musa_patch", "torchada")

_lock = threading.Lock()
_outcome: dict[str, AcceleratorError | None] = {}


def _renew_lock() -> None:
    """In a forked child: a thread that held the lock is not there to give it back."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_lock)


def musa_route() -> str:
    """How CUDA-hard-coded libraries reach MUSA in this process."""
    asked = os.environ.get(ROUTE_ENV, "").strip().lower()
    path = os.environ.get(PATCH_PATH_ENV, "").strip()
    if asked and asked not in ROUTES:
        raise AcceleratorError(f"{ROUTE_ENV}={asked!r}: choose one of {', '.join(ROUTES)}")
    if path and asked not in ("", "musa_patch"):
        raise AcceleratorError(
            f"{PATCH_PATH_ENV}={path!r} asks for musa_patch and {ROUTE_ENV}={asked!r} does not: unset one"
        )
    return "musa_patch" if path else asked or "hook"


def bootstrap() -> None:
    """Import what the route needs, once. A failure is remembered and raised again, not tried again."""
    with _lock:
        route = musa_route()
        if route not in _outcome:
            _outcome[route] = None if route == "hook" else _import(route)
        error = _outcome[route]
    if error is not None:
        raise error


def _import(module: str) -> AcceleratorError | None:
    path = os.environ.get(PATCH_PATH_ENV, "").strip()
    if module == "musa_patch" and path:
        if not (Path(path) / "musa_patch").is_dir() and not (Path(path) / "musa_patch.py").is_file():
            return AcceleratorError(
                f"{PATCH_PATH_ENV}={path!r} holds no musa_patch: give the directory that contains it"
            )
        sys.path.insert(0, path)
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a vendor's patch set may raise anything: kept as the cause
        failure = AcceleratorError(f"importing {module} for MUSA failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None
