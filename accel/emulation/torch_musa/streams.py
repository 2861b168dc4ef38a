"""Streams and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch_musa.device import DeviceLike, _get_device_index

_PRIVATEUSE1 = torch._C._autograd.DeviceType.PrivateUse1.value


class Stream(torch.Stream):
    """A queue of work of one device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: Any) -> Stream:
        if ids:  # an existing one: stream_id, device_index, device_type
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=torch.device("musa", _get_device_index(device)), priority=priority)


class Event(torch.Event):
    """A point in a stream's work."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        if interprocess:
            raise RuntimeError("the emulated MUSA device has no IPC handles: events stay in their process")
        return super().__new__(cls, torch.device("musa"), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: DeviceLike = None) -> Stream:
    found = torch._C._accelerator_getStream(_get_device_index(device))
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def default_stream(device: DeviceLike = None) -> Stream:
    return Stream(stream_id=0, device_index=_get_device_index(device), device_type=_PRIVATEUSE1)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream current; None changes nothing."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


StreamContext = stream
