"""Every method of the contract for a device that torch describes: such a vendor declares facts and nothing else."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from accel.contract import Accelerator, MemoryInfo


class TorchAccelerator(Accelerator):
    """Answers from ``torch.<device_type>``, the module that a vendor's plugin (or torch itself) registers."""

    def prepare(self) -> None:
        if self.torch_plugin is not None and importlib.util.find_spec(self.torch_plugin) is not None:
            importlib.import_module(self.torch_plugin)

    def unavailable_reason(self) -> str | None:
        if self.torch_plugin is not None and importlib.util.find_spec(self.torch_plugin) is None:
            return f"{self.torch_plugin} is not installed: install the vendor's build for torch {torch.__version__}"
        if not hasattr(torch, self.device_type):
            return f"torch {torch.__version__} has no device type {self.device_type!r}: install the vendor's plugin"
        if not self.module.is_available():
            return f"torch.{self.device_type}.is_available() is False: no driver or no device is visible"
        return None

    @property
    def module(self) -> Any:
        """The device's module in torch."""
        return torch.get_device_module(self.device_type)

    def device_count(self) -> int:
        return self.module.device_count()

    def set_device(self, index: int) -> None:
        self.check_index(index)
        self.module.set_device(self.device(index))

    def current_device(self) -> int:
        return self.module.current_device()

    def device_name(self, index: int) -> str:
        return self.module.get_device_properties(self.device(index)).name

    def device_uuid(self, index: int) -> str | None:
        uuid = getattr(self.module.get_device_properties(self.device(index)), "uuid", None)
        return None if uuid is None else str(uuid)

    def synchronize(self, index: int | None = None) -> None:
        self.module.synchronize(self.device(index))

    def manual_seed(self, seed: int) -> None:
        self.module.manual_seed_all(seed)

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        return self.module.get_rng_state(self.device(index))

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        self.module.set_rng_state(state, self.device(index))

    def memory_info(self, index: int | None = None) -> MemoryInfo:
        device, module = self.device(index), self.module
        free, total = module.mem_get_info(device)
        if not self.capabilities.memory_stats:
            return MemoryInfo(free=free, total=total)
        return MemoryInfo(
            free=free,
            total=total,
            allocated=module.memory_allocated(device),
            reserved=module.memory_reserved(device),
            peak=module.max_memory_allocated(device),
        )

    def reset_peak_memory(self, index: int | None = None) -> None:
        if self.capabilities.memory_stats:
            self.module.reset_peak_memory_stats(self.device(index))

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def ipc_collect(self) -> None:
        if self.capabilities.ipc:
            self.module.ipc_collect()

    def record_memory_history(self, *, enabled: bool) -> None:
        self.require("memory_snapshot")
        self.module.memory._record_memory_history("all" if enabled else None)

    def save_memory_snapshot(self, path: Path) -> None:
        self.require("memory_snapshot")
        self.module.memory._dump_snapshot(str(path))

    def torch_namespace(self) -> Any:
        return self.module
