"""Stands where CUDA-hard-coded code says ``torch.cuda`` when the device is the host processor.

Host work is done when a call returns, so streams order nothing and events only tell the time. What a processor does not
have (graphs, memory pools, device properties) is absent on purpose: asking for it is an error that names it.
"""

# ruff: noqa: ARG001, ARG002, ARG005 - the signatures are those of torch.cuda

from __future__ import annotations

import time as _time
from collections.abc import Callable as _Callable
from contextlib import AbstractContextManager as _AbstractContextManager
from contextlib import nullcontext as _nullcontext
from functools import partial as _partial
from types import SimpleNamespace as _SimpleNamespace
from typing import Any as _Any

import torch as _torch

FloatTensor = _torch.FloatTensor
DoubleTensor = _torch.DoubleTensor
HalfTensor = _torch.HalfTensor
BFloat16Tensor = _torch.BFloat16Tensor
IntTensor = _torch.IntTensor
LongTensor = _torch.LongTensor
ByteTensor = _torch.ByteTensor
BoolTensor = _torch.BoolTensor
OutOfMemoryError = _torch.OutOfMemoryError


class Event:
    """A point in time on the one order of work that the host has."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_at = _time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._recorded_at - self._recorded_at) * 1000.0


class Stream:
    """A queue of work that is always empty. Usable as a context: Megatron-Core enters streams with ``stream(s)``."""

    cuda_stream = 0  # the raw handle, where CUDA's default stream is 0 as well

    def __init__(self, device: _Any = None, priority: int = 0) -> None:
        self.device = _torch.device("cpu")
        self.priority = priority

    def wait_stream(self, stream: Stream) -> None:
        return

    def wait_event(self, event: Event) -> None:
        return

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


_default_stream = Stream()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def init() -> None:
    return


def _lazy_init() -> None:
    return


def _lazy_call(function: _Callable[[], object]) -> None:
    function()  # there is no later moment at which the device comes up


def device_count() -> int:
    return 1


def current_device() -> _torch.device:
    # Not 0: torch takes a bare number given as `device=` for an accelerator's, and Megatron-Core passes this one on.
    return _torch.device("cpu")


def set_device(device: _Any) -> None:
    return


def device(device: _Any) -> _AbstractContextManager[None]:
    return _nullcontext()


def synchronize(device: _Any = None) -> None:
    return


def empty_cache() -> None:
    return


def current_stream(device: _Any = None) -> Stream:
    return _default_stream


def default_stream(device: _Any = None) -> Stream:
    return _default_stream


def set_stream(stream: Stream) -> None:
    return


def stream(stream: Stream | None) -> _AbstractContextManager[None]:
    return _nullcontext()


def is_current_stream_capturing() -> bool:
    return False


def manual_seed(seed: int) -> None:
    # Not torch.manual_seed, which seeds every device and would come back here.
    _torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return _torch.default_generator.initial_seed()


def get_rng_state(device: _Any = None) -> _torch.Tensor:
    return _torch.default_generator.get_state()


def set_rng_state(new_state: _torch.Tensor, device: _Any = None) -> None:
    _torch.default_generator.set_state(new_state)


class _DefaultGenerators:
    """torch has one generator for the host, whatever the index: a number, or what ``current_device()`` answers."""

    def __getitem__(self, index: _Any) -> _torch.Generator:
        return _torch.default_generator

    def __len__(self) -> int:
        return 1


default_generators = _DefaultGenerators()

random = _SimpleNamespace(
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed_all,
    initial_seed=initial_seed,
)

amp = _SimpleNamespace(
    autocast=_partial(_torch.amp.autocast, "cpu"),
    custom_fwd=_partial(_torch.amp.custom_fwd, device_type="cpu"),
    custom_bwd=_partial(_torch.amp.custom_bwd, device_type="cpu"),
    GradScaler=_partial(_torch.amp.GradScaler, "cpu"),
)


def _no_mark(*args: object, **kwargs: object) -> None:
    return  # markers for a CUDA profiler, which does not watch the host


nvtx = _SimpleNamespace(
    mark=_no_mark,
    range_push=_no_mark,
    range_pop=_no_mark,
    range=lambda message, *args, **kwargs: _nullcontext(),
)
