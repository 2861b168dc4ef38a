"""What rewritten code talks to at run time, where its source says ``torch.cuda``, ``x.cuda(i)`` and the like."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch

from accel.retarget.errors import MissingDeviceAttribute, MissingDeviceImport, RetargetError

# Globals that the loader gives to every rewritten module.
NAMESPACE_NAME = "__accelrl_device__"
HELPERS_NAME = "__accelrl_sites__"


class DeviceNamespace:
    """Stands where the source says ``torch.cuda``: every attribute is the device's own, or an error that names it."""

    __slots__ = ("_retarget_device_type", "_retarget_target")

    def __init__(self, device_type: str, target: Any) -> None:
        object.__setattr__(self, "_retarget_device_type", device_type)
        object.__setattr__(self, "_retarget_target", target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_retarget_"):  # a copy that was never initialised would look for its target here
            raise AttributeError(name)
        # Nothing is cached: torch replaces some of these when a device is initialised (default_generators).
        try:
            return getattr(self._retarget_target, name)
        except AttributeError:
            pass
        raise MissingDeviceAttribute(
            f"{_caller(sys._getframe(1))} uses torch.cuda.{name}, "
            f"and the namespace of device '{self._retarget_device_type}' has no {name}. "
            f"Add it to what the accelerator's torch_namespace() returns, or do without the feature that asks for it."
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse(f"sets torch.cuda.{name}")

    def __delattr__(self, name: str) -> NoReturn:
        self._refuse(f"deletes torch.cuda.{name}")

    def __dir__(self) -> list[str]:
        return dir(self._retarget_target)

    def __repr__(self) -> str:
        return f"<torch.cuda retargeted to device '{self._retarget_device_type}'>"

    def _refuse(self, what: str) -> NoReturn:
        raise RetargetError(
            f"{_caller(sys._getframe(2))} {what}; the namespace of device '{self._retarget_device_type}' is read-only"
        )


class SiteHelpers:
    """The calls into which sites with a run-time value are rewritten."""

    def __init__(self, device_type: str, namespace: DeviceNamespace) -> None:
        self.device_type = device_type
        self._namespace = namespace

    def device(self, index: int | str | torch.device | None) -> torch.device:
        """``torch.device("cuda", index)`` and the argument of ``x.cuda(index)``."""
        if isinstance(index, int):
            return torch.device(self.device_type, index)
        device = torch.device(self.device_type if index is None else index)
        if device.type == "cuda":
            raise RetargetError(
                f"{_caller(sys._getframe(1))} is given '{device}', but this process trains on '{self.device_type}'"
            )
        return device

    def index(self, value: Any) -> Any:
        """The field of ``f"cuda:{value}"``: a namespace may answer ``current_device()`` with a device, not a number."""
        if isinstance(value, torch.device):
            return value.index or 0
        return value

    def import_name(self, path: str) -> Any:
        """``from torch.cuda import path`` (dotted for a submodule) where its absence is caught: MissingDeviceImport."""
        found = self._find(path)
        if isinstance(found, AbsentName):
            raise MissingDeviceImport(f"{_caller(sys._getframe(1))} {found}")
        return found

    def import_for_use(self, path: str) -> Any:
        """The same where it is not caught: a module may import at its top what this device never gets to use."""
        return self._find(path)

    def _find(self, path: str) -> Any:
        found: Any = self._namespace
        for part in path.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                return AbsentName(
                    f"imports torch.cuda.{path}, and the namespace of device '{self.device_type}' has no {part}"
                )
        return found


class AbsentName:
    """Bound by an import of something that the device does not have; every use of it raises MissingDeviceAttribute."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __str__(self) -> str:
        return self._what

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self._raise()

    def __getattr__(self, name: str) -> NoReturn:
        self._raise()

    def __instancecheck__(self, instance: object) -> NoReturn:
        self._raise()

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        self._raise()

    def __enter__(self) -> NoReturn:
        self._raise()

    def __exit__(self, *_: object) -> None:
        return

    def _raise(self) -> NoReturn:
        raise MissingDeviceAttribute(f"{_caller(sys._getframe(2))} uses what it {self._what}")


def _caller(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')} line {frame.f_lineno} ({frame.f_code.co_filename})"
