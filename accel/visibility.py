"""Physical device ids and local indices under a vendor's visible-devices variable.

The variable lists physical ids; a process numbers what it sees from 0. Ray, schedulers and users hand out either kind.
Everything here reads the variable alone, so that a driver can plan for devices that it lacks.
"""

from __future__ import annotations

import math
import re

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.masks import UUID_LIKE, VisibleDevices
from accel.registry import get_accelerator, process_registry

_WHOLE = re.compile(r"\d+(\.0*)?")


def visible_devices(accelerator: Accelerator | str | None = None) -> VisibleDevices:
    """The list of the selected backend, of a given one, or of a named one (whose hardware is not touched)."""
    backend = _backend(accelerator)
    return VisibleDevices.parse(backend.mask_variable(), backend.visible_devices())


def resolve_visible_device_id(physical: int | float | str, accelerator: Accelerator | str | None = None) -> int:
    """Local index of the device that Ray, a scheduler or a user calls ``physical``.

    Accepts ints, the floats that Ray hands out (also as text, "0.0") and UUIDs, matched exactly. An id that is in the
    list is physical; a number that is not, but is a valid local index, is taken as that; anything else is an
    AcceleratorError that names the variable, its list and what would be valid.
    """
    return visible_devices(accelerator).local_index(_device_id(physical))


def physical_device_id(local: int, accelerator: Accelerator | str | None = None) -> str:
    """The inverse: the physical id (or UUID) at a local index."""
    number = _device_id(local)
    if not number.isdecimal():
        raise AcceleratorError(f"{local!r} is no local device index: give a whole number, 0 or more")
    return visible_devices(accelerator).physical_id(int(number))


def _backend(accelerator: Accelerator | str | None) -> Accelerator:
    if accelerator is None:
        return get_accelerator()
    return process_registry().platform(accelerator) if isinstance(accelerator, str) else accelerator


def _device_id(given: int | float | str) -> str:
    """The id as the lists spell it: "0" for 0, 0.0 and "0.0"; a UUID as it is."""
    if isinstance(given, bool) or (isinstance(given, float) and not (math.isfinite(given) and given.is_integer())):
        raise AcceleratorError(f"{given!r} is no device id: give a whole number or a UUID")
    text = str(int(given)) if isinstance(given, (int, float)) else given.strip()
    if _WHOLE.fullmatch(text):
        return str(int(text.partition(".")[0]))
    if UUID_LIKE.fullmatch(text):
        return text
    raise AcceleratorError(f"{given!r} is no device id: give a whole number, 0 or more, or a UUID")
