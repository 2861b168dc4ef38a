"""Backends for tests of selection: usable or not as they are told, without a device of their own."""

from __future__ import annotations

from collections.abc import Callable

from accel.backends.cpu import CpuAccelerator
from accel.contract import Accelerator, Capabilities
from accel.masks import VisibleDevices
from accel.registry import Registration, Registry


def fake(
    name: str, *, priority: int = 50, reason: str | None = None, error: Exception | None = None
) -> Callable[[], Accelerator]:
    """A factory of a backend on the host that is usable, gives a reason, or raises when it is probed."""

    class Fake(CpuAccelerator):
        def unavailable_reason(self) -> str | None:
            if error is not None:
                raise error
            return reason

    Fake.name = name
    Fake.priority = priority
    return Fake


def registry_of(
    environ: dict[str, str] | None = None,
    installed: list[Registration] | None = None,
    **factories: Callable[[], Accelerator],
) -> Registry:
    """A registry apart from the process's, with these backends beside the built-in ones."""
    registry = Registry(environ or {}, lambda: installed or [])
    for name, factory in factories.items():
        registry.register(name, factory, override=True)
    return registry


class ImportableAccelerator(CpuAccelerator):
    """A backend that another process can import."""

    name = "importable"
    visible_devices_env = "IMPORTABLE_VISIBLE_DEVICES"
    ray_resource = "IMPORTABLE"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_IMPORTABLE_VISIBLE_DEVICES"
    capabilities = Capabilities(own_generator=False, bf16=True)
    per_node_env = ("IMPORTABLE_SOCKET_IFNAME",)
    same_masks = ("OTHER_VISIBLE_DEVICES",)
    lower_masks = ("LOWER_VISIBLE_DEVICES",)


class CountedByRay(CpuAccelerator):
    """A backend whose devices Ray knows as GPUs, under a mask that Ray sets unless it is told not to."""

    name = "counted"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    capabilities = Capabilities(own_generator=False, bf16=True)

    def device_count(self) -> int:
        listed = VisibleDevices.parse(self.visible_devices_env, self.visible_devices()).ids
        return 8 if listed is None else len(listed)


class BlindToItsMask(CountedByRay):
    """Says that it has one device, whatever the mask lists."""

    def device_count(self) -> int:
        return 1
