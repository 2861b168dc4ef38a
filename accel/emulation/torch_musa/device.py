"""Devices: which there are, which one is current."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

_extension = sys.modules["_accelrl_musa"]

DeviceLike = int | str | torch.device | None


def _get_device_index(device: DeviceLike = None, optional: bool = False, allow_cpu: bool = False) -> int:  # noqa: ARG001
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type == "cpu" and allow_cpu:
        return -1
    if named.type != "musa":
        raise ValueError(f"Expected a musa device, but got: {named}")
    return current_device() if named.index is None else named.index


def init() -> None:
    return


_lazy_init = init


def _lazy_call(function: Callable[[], object], **_: Any) -> None:
    function()


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return _extension.in_bad_fork()


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _extension.device_count()


def current_device() -> int:
    return _extension.current_device()


def set_device(device: DeviceLike) -> None:
    """A negative index is left out, as the real one does."""
    index = _get_device_index(device)
    if index >= 0:
        _extension.set_device(index)


def synchronize(device: DeviceLike = None) -> None:
    torch._C._accelerator_synchronizeDevice(_get_device_index(device))  # torchada sends torch.accelerator here


def _exchange_device(index: int) -> int:
    return _extension.exchange_device(index)


_maybe_exchange_device = _exchange_device


class device:
    """Context manager that makes a device current."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = _get_device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """The device of a tensor; any other tensor changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == "musa" else -1)


def get_device_properties(device: DeviceLike) -> SimpleNamespace:
    """The argument has no default, as in the real one."""
    index = _get_device_index(device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return SimpleNamespace(
        name="MTT S5000 (emulated)",
        major=3,
        minor=1,
        total_memory=_extension.capacity(),
        multi_processor_count=56,
        warp_size=32,
    )


def get_device_name(device: DeviceLike = None) -> str:
    return get_device_properties(_get_device_index(device)).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    properties = get_device_properties(_get_device_index(device))
    return properties.major, properties.minor


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """All memory is the host's, unless hardware without peer access is emulated."""
    here, there = _get_device_index(device), _get_device_index(peer_device)
    return here != there and not _extension.asynchronous()


def is_bf16_supported(including_emulation: bool = True) -> bool:  # noqa: ARG001
    return True


def get_arch_list() -> list[str]:
    return ["mp_31"]
