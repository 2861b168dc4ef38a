"""The accelerator layer: which device am I on, how do I reach its siblings, what can it do?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel.contract import Accelerator as Accelerator
    from accel.contract import Capabilities as Capabilities
    from accel.contract import MemoryInfo as MemoryInfo
    from accel.errors import AcceleratorError as AcceleratorError
    from accel.handoff import accelerator_spec as accelerator_spec
    from accel.handoff import load_accelerator_spec as load_accelerator_spec
    from accel.registry import available_accelerators as available_accelerators
    from accel.registry import get_accelerator as get_accelerator
    from accel.registry import register_accelerator as register_accelerator
    from accel.registry import select_accelerator as select_accelerator
    from accel.visibility import physical_device_id as physical_device_id
    from accel.visibility import resolve_visible_device_id as resolve_visible_device_id

_HOME = {
    "Accelerator": "accel.contract",
    "Capabilities": "accel.contract",
    "MemoryInfo": "accel.contract",
    "AcceleratorError": "accel.errors",
    "accelerator_spec": "accel.handoff",
    "load_accelerator_spec": "accel.handoff",
    "available_accelerators": "accel.registry",
    "get_accelerator": "accel.registry",
    "register_accelerator": "accel.registry",
    "select_accelerator": "accel.registry",
    "physical_device_id": "accel.visibility",
    "resolve_visible_device_id": "accel.visibility",
}

__all__ = [
    "Accelerator",
    "AcceleratorError",
    "Capabilities",
    "MemoryInfo",
    "accelerator_spec",
    "available_accelerators",
    "get_accelerator",
    "load_accelerator_spec",
    "physical_device_id",
    "register_accelerator",
    "resolve_visible_device_id",
    "select_accelerator",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import accel`` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
