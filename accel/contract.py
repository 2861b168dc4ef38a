"""What a vendor says about its hardware: declared facts, frozen capabilities, and a dozen methods."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import torch

from accel.errors import AcceleratorError


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. The rest of the code asks for these, never for a vendor's name."""

    exclusive_devices: bool = (
        True  # a device serves one role at a time; on False, roles share devices (host processors)
    )
    host_memory: bool = False  # the device's memory is the host's: what is to leave it goes to a file
    own_generator: bool = True  # random numbers of the device come from generators other than the host's
    streams: bool = False
    events: bool = False
    bf16: bool = False
    fp16: bool = False
    amp: bool = False
    deterministic: bool = False  # kernels that give the same bits every time, when asked for
    pinned_memory: bool = False
    memory_stats: bool = False  # allocated, reserved and peak bytes of the caching allocator
    memory_snapshot: bool = False  # history of allocations, written to a file
    oom_observer: bool = False  # a callback when an allocation fails
    memory_saver: bool = False  # torch_memory_saver can unmap and remap this device's memory
    ipc: bool = False  # tensors cross processes by handle instead of by copy
    process_group_reload: bool = False  # destroying the collectives' groups gives device memory back
    process_group_device_id: bool = False  # init_process_group takes device_id
    uneven_all_gather: bool = False  # all_gather of tensors whose sizes differ between ranks
    expandable_segments: bool = False
    init_on_device: bool = False  # models are built on the device; else on the host, then moved
    safetensors_device: bool = False  # safetensors opens a file straight onto the device
    flash_attention: bool = False
    grouped_gemm: bool = False
    triton: bool = False
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
    """One vendor's devices. A subclass declares the facts and overrides what ``torch.accelerator`` cannot answer.

    Making one is free: no vendor import, no device. The registry calls ``prepare`` and then ``unavailable_reason`` once
    before a process uses it. Indices are local: positions in the visible-devices list (see ``accel/visibility.py``).
    """

    # Identity and placement.
    name: ClassVar[str]
    device_type: ClassVar[str]
    visible_devices_env: ClassVar[str | None]
    ray_resource: ClassVar[str]  # "GPU" asks Ray for num_gpus; anything else is a custom resource
    ray_noset_env: ClassVar[str | None]
    # Collectives.
    train_backend: ClassVar[str]
    weight_update_backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    priority: ClassVar[int] = 50  # auto takes the highest usable one; cpu is 0
    emulated: ClassVar[bool] = False
    # Facts with a default that suits most.
    torch_plugin: ClassVar[str | None] = None  # module that adds the device type to torch
    same_masks: ClassVar[tuple[str, ...]] = ()  # variables that must equal visible_devices_env if both are set
    stand_in_mask: ClassVar[str | None] = None  # the runtime reads it where visible_devices_env is unset or empty
    lower_masks: ClassVar[tuple[str, ...]] = ()  # masks that renumber devices: never beside visible_devices_env
    socket_ifname_env: ClassVar[str | None] = None  # network interface of the collectives' library
    allocator_env: ClassVar[str | None] = None  # settings of the caching allocator
    deterministic_env: ClassVar[Mapping[str, str]] = MappingProxyType({})  # what deterministic kernels also need
    profiler_activity: ClassVar[str | None] = None  # name in torch.profiler.ProfilerActivity
    sglang_platform: ClassVar[str | None] = None  # SGLANG_PLATFORM of rollout servers, for one outside SGLang's tree
    sglang_arguments: ClassVar[tuple[str, ...]] = ()  # what SGLang's command line needs on this device
    sglang_env: ClassVar[tuple[tuple[str, str], ...]] = ()  # further variables of rollout servers
    monitor_package: ClassVar[str | None] = None  # distribution that reads the cards' health ("nvidia-ml-py")
    env_prefixes: ClassVar[tuple[str, ...]] = ()  # environment variables that doctor shows
    per_node_env: ClassVar[tuple[str, ...]] = ()  # variables a driver must not broadcast to other nodes

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """None when usable; else why not and what to do. May raise: the registry records what it raised."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices this process sees."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make ``index`` the current device; AcceleratorError names the range and the variable when it is outside."""

    @abstractmethod
    def current_device(self) -> int: ...

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Wait until the device has finished what was queued on it."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's generators (all visible devices), not the host's where the two differ."""

    @abstractmethod
    def rng_state(self, index: int | None = None) -> torch.Tensor:
        """State of the device's generator, a uint8 tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None: ...

    @abstractmethod
    def memory_info(self, index: int | None = None) -> MemoryInfo: ...

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused blocks back to the device."""

    @abstractmethod
    def torch_namespace(self) -> ModuleType | Any:
        """The object that stands where other libraries hard-code one vendor's device module (``accel/retarget/``)."""

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Import what the vendor needs, before the first probe. Called once; what it raises is kept as the cause."""

    def redirects_cuda(self) -> bool:
        """Whether what ``prepare`` imported points that module itself at this device: then nothing is rewritten."""
        return False

    def emulation(self) -> Accelerator | None:
        """The same platform emulated in host memory, where there is one."""
        return None

    def device(self, index: int | None = None) -> torch.device:
        """A torch device; never a bare int, which torch takes for CUDA."""
        return torch.device(self.device_type, self.current_device() if index is None else index)

    def device_name(self, index: int) -> str:
        """The product's name, for people."""
        return f"{self.name}:{index}"

    def more_devices_hint(self) -> str:
        """What a person can do when a job needs more devices than there are."""
        variable = self.visible_devices_env
        return "Ask for fewer" + (f", or make more devices visible in {variable}." if variable else ".")

    def device_uuid(self, index: int) -> str | None:  # noqa: ARG002 - vendors with UUIDs override
        """What pairs a trainer with the engine on the same card; None where the vendor has none (the index does)."""
        return None

    def runtime_version(self) -> str | None:
        """Version of the vendor's runtime as torch knows it."""
        return None

    def worker_env(self, threads: int) -> dict[str, str]:
        """Environment of a worker process, set before its Python starts; ``threads`` are its CPU threads."""
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if self.torch_plugin is None:
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would import any other vendor's installed plugin
        return env

    def mask_variable(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The visible-devices variable that counts here: the vendor's own, or the one that stands in for it."""
        own, other = self.visible_devices_env, self.stand_in_mask
        if own and other and not environ.get(own, "").strip() and environ.get(other, "").strip():
            return other
        return own

    def visible_devices(self) -> str | None:
        """The value of that variable, or None when it is unset or there is none."""
        variable = self.mask_variable()
        return os.environ.get(variable) if variable else None

    def autocast(self, dtype: torch.dtype, *, enabled: bool = True) -> AbstractContextManager[Any]:
        """Mixed precision on this device."""
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    def use_deterministic_algorithms(self) -> None:
        """From now on only kernels that give the same bits every time; an operator that has none raises by name.

        For the life of the process, before its first kernel. Needs ``capabilities.deterministic``.
        """
        self.require("deterministic")
        for variable, value in self.deterministic_env.items():
            os.environ.setdefault(variable, value)
        torch.use_deterministic_algorithms(True)
        # Nothing of ours reads what it did not write.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def reset_peak_memory(self, index: int | None = None) -> None:  # noqa: B027 - nothing to reset by default
        """Start ``MemoryInfo.peak`` anew, where the allocator keeps one."""

    def stream(self) -> Any:
        """A new side stream, a context manager. Needs ``capabilities.streams``."""
        self.require("streams")
        return torch.Stream(self.device())

    def current_stream(self) -> Any:
        self.require("streams")
        return torch.accelerator.current_stream(self.device())

    def event(self, *, timing: bool = False) -> Any:
        """An event (record, wait, synchronize, elapsed_time in ms). Needs ``capabilities.events``."""
        self.require("events")
        return torch.Event(self.device(), enable_timing=timing)

    def ipc_collect(self) -> None:  # noqa: B027 - nothing to collect by default
        """Free memory that other processes have let go of, where tensors cross by handle."""

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """What ``torch.profiler.profile(activities=…)`` should record: the host, and the device where it is known."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.profiler_activity is not None:
            activities.append(torch.profiler.ProfilerActivity.__members__[self.profiler_activity])
        return activities

    def record_memory_history(self, *, enabled: bool) -> None:  # noqa: ARG002 - backends with a history override
        """Start or stop keeping allocations for ``save_memory_snapshot``. Needs ``capabilities.memory_snapshot``."""
        self.require("memory_snapshot")

    def save_memory_snapshot(self, path: Path) -> None:  # noqa: ARG002 - backends with a history override
        """Write the recorded allocations for https://pytorch.org/memory_viz. Needs ``capabilities.memory_snapshot``."""
        self.require("memory_snapshot")

    def attach_oom_observer(self, observer: Callable[[int, int, int, int], None]) -> None:  # noqa: ARG002
        """Call ``observer(device, alloc, total, free)`` in bytes when an allocation fails. Needs ``oom_observer``."""
        self.require("oom_observer")

    def require(self, capability: str) -> None:
        """AcceleratorError unless the backend has this capability; a misspelt name is an AttributeError."""
        if not getattr(self.capabilities, capability):
            raise AcceleratorError(f"the accelerator {self.name!r} has no {capability}: ask its capabilities first")

    def check_index(self, index: int) -> int:
        """``index`` if it is a local device index, else AcceleratorError with the range and the variable."""
        count = self.device_count()
        if 0 <= index < count:
            return index
        mask = f" ({self.mask_variable()}={self.visible_devices()})" if self.visible_devices_env else ""
        raise AcceleratorError(f"{self.name} has no device {index}: this process sees {count}, 0 to {count - 1}{mask}")
