"""Keeps DeepEP's buffers out of the memory that torch_memory_saver pauses and resumes."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.memory.saver import PACKAGE
from accel.registry import get_accelerator

BUFFERS = ("Buffer", "ElasticBuffer")  # ElasticBuffer from DeepEP 2 on
_GUARDED = "__accelrl_guarded__"
_installing = threading.Lock()


def install_deep_ep_guard(accelerator: Accelerator | None = None) -> None:
    """Make every DeepEP buffer of this process allocate outside the memory saver's region. Call when training with
    DeepEP begins; calling it again changes nothing.

    A buffer that DeepEP allocates inside the region would lose its memory at the next pause, with peers still writing
    into it. So its ``__init__`` runs with the region flag cleared, the device is synchronised (the selected one, if
    ``accelerator`` is None), and the flag gets back the value that it had, after an exception too. The flag is each
    thread's own, so threads do not meet and no lock is held while ranks wait for one another.

    AcceleratorError: deep_ep cannot be imported, or has no buffers; and, at the first guarded call, a saver that cannot
    tell its flag.
    """
    module = _deep_ep()
    buffers = [buffer for name in BUFFERS if (buffer := getattr(module, name, None)) is not None]
    if not buffers:
        raise AcceleratorError(f"{module.__file__} has none of {', '.join(BUFFERS)}: is it another package's deep_ep?")
    with _installing:
        for buffer in buffers:
            _guard(buffer, accelerator)


def _deep_ep() -> ModuleType:
    try:
        return importlib.import_module("deep_ep")
    except ImportError as error:
        raise AcceleratorError(
            f"training with DeepEP was asked for, and deep_ep cannot be imported ({error}): install deep-ep or "
            "sgl-deep-ep for this accelerator, or choose another token dispatcher"
        ) from error


def _guard(buffer: type, accelerator: Accelerator | None) -> None:
    initialise: Callable[..., Any] = buffer.__init__  # type: ignore[misc]
    if hasattr(initialise, _GUARDED):  # also where a class inherits a guarded one
        return

    @functools.wraps(initialise)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        library = _active_library()
        if library is None:
            return initialise(self, *args, **kwargs)
        inside = _region_flag(library)
        library.tms_set_interesting_region(False)
        try:
            result = initialise(self, *args, **kwargs)
            # DeepEP fills its buffers on streams of its own: what it queued must not meet a region that is on again.
            (accelerator or get_accelerator()).synchronize()
            return result
        finally:
            library.tms_set_interesting_region(inside)

    setattr(guarded, _GUARDED, True)
    buffer.__init__ = guarded  # type: ignore[misc]


def _active_library() -> Any | None:
    """The saver's shared library once it is in use in this process, else None. Imports nothing."""
    package = sys.modules.get(PACKAGE)
    if package is None:
        return None
    try:
        implementation = package.torch_memory_saver._impl
    except AttributeError as error:  # 0.0.8 keeps its library elsewhere
        raise _too_old() from error
    return None if implementation is None else implementation._binary_wrapper.cdll


def _region_flag(library: Any) -> bool:
    try:
        read = library.tms_get_interesting_region
    except AttributeError as error:
        raise _too_old() from error
    return bool(read())


def _too_old() -> AcceleratorError:
    try:
        found = f"torch_memory_saver {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        found = "this torch_memory_saver"
    return AcceleratorError(
        f"{found} cannot tell whether its region is on (tms_get_interesting_region), so a DeepEP buffer cannot be kept "
        "out of it: 0.0.9 or newer is needed, pip install 'torch-memory-saver>=0.0.9'"
    )
