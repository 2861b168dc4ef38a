"""What a vendor says about its hardware: declared facts, frozen capabilities, and a dozen methods."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. The rest of the code asks for these, never for a vendor's name."""

    exclusive_devices: bool = True  # a device serves one role at a time; on False, roles share devices (host processors)
    streams: bool = False
    events: bool = False
    bf16: bool = False
    fp16: bool = False
    amp: bool = False
    memory_stats: bool = False
    memory_saver: bool = False
    ipc: bool = False
    process_group_reload: bool = False
    expandable_segments: bool = False
    deep_ep: bool = False


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on one device; None where the backend cannot tell."""

    free: int | None
    total: int | None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None


class Accelerator(ABC):
    """One vendor's devices. A subclass declares the facts and overrides what ``torch.accelerator`` cannot answer."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    visible_devices_env: ClassVar[str | None]
    ray_resource: ClassVar[str]  # "GPU" asks Ray for num_gpus; anything else is a custom resource
    ray_noset_env: ClassVar[str | None]
    train_backend: ClassVar[str]
    weight_update_backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    priority: ClassVar[int] = 50

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """None when usable; else why not and what to do. May raise: the registry records what it raised."""

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def set_device(self, index: int) -> None: ...

    @abstractmethod
    def current_device(self) -> int: ...

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None: ...

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    @abstractmethod
    def memory_info(self, index: int | None = None) -> MemoryInfo: ...

    @abstractmethod
    def empty_cache(self) -> None: ...

    @abstractmethod
    def torch_namespace(self) -> ModuleType | Any:
        """The object that stands where CUDA-hard-coded code says ``torch.cuda`` (see ``accel/retarget.py``)."""

    def device(self, index: int | None = None) -> torch.device:
        """A torch device; never a bare int, which torch takes for CUDA."""
        return torch.device(self.device_type, self.current_device() if index is None else index)

    def worker_env(self, threads: int) -> dict[str, str]:
        """Environment of a worker process, set before its Python starts; ``threads`` are its CPU threads."""
        return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}

    def visible_devices(self) -> str | None:
        """The value of the visible-devices variable, or None when it is unset or there is none."""
        return os.environ.get(self.visible_devices_env) if self.visible_devices_env else None
