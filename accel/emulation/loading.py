"""Brings the emulation into this process, for the rest of its life."""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from accel.emulation.build import MODULE, build
from accel.emulation.settings import EmulationSettings
from accel.errors import AcceleratorError

STAND_IN = Path(__file__).parent / "torch_musa" / "__init__.py"

_lock = threading.Lock()


def load_emulation() -> ModuleType:
    """The stand-in, importable as ``torch_musa`` from now on. The environment is read at the first call only.

    AcceleratorError: a real torch_musa is installed, another backend has taken torch's free device type, or the
    extension cannot be compiled.
    """
    with _lock:
        present = sys.modules.get("torch_musa")
        if present is not None and is_stand_in(present):
            return present
        refuse_real_device()
        settings = EmulationSettings.from_environment()
        extension = _load_extension(build())
        return _load_stand_in(extension, settings)


def is_stand_in(module: ModuleType) -> bool:
    return getattr(module, "__file__", None) == str(STAND_IN)


def refuse_real_device() -> None:
    """An emulation beside the real thing could be taken for it: there must be only one."""
    origin = _torch_musa_origin()
    if origin is not None and origin != str(STAND_IN):
        raise AcceleratorError(
            f"a real torch_musa is installed ({origin}), so its device is not emulated: leave --emulate and "
            "ACCELRL_EMULATE_MUSA out, or use an environment without torch_musa"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise AcceleratorError(
            f"torch has room for one device type from outside, and this process gave it to {taken!r}: emulate in a "
            "process of its own"
        )


def _torch_musa_origin() -> str | None:
    present = sys.modules.get("torch_musa")
    if present is not None:
        return getattr(present, "__file__", None) or "already imported"
    spec = importlib.util.find_spec("torch_musa")
    return None if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())


def _load_extension(path: Path) -> ModuleType:
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def _load_stand_in(extension: ModuleType, settings: EmulationSettings) -> ModuleType:
    """Under the real module's name: other libraries import it by that."""
    extension.start(len(settings.devices), settings.memory, settings.asynchronous)
    spec = importlib.util.spec_from_file_location(
        "torch_musa", STAND_IN, submodule_search_locations=[str(STAND_IN.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_musa"] = module
    spec.loader.exec_module(module)
    return module
