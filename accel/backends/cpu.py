"""The host's processors as an accelerator: a real backend, and as many devices as one asks for."""

# ruff: noqa: ARG002 - one host serves every index

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accel.contract import Accelerator, Capabilities, MemoryInfo
from accel.errors import AcceleratorError
from accel.masks import MOST_DEVICES

DEVICES_ENV = "ACCELRL_CPU_DEVICES"


class CpuAccelerator(Accelerator):
    """Host processors. Devices are places for ranks and engines; they share the memory and, if need be, the cores."""

    name = "cpu"
    device_type = "cpu"
    visible_devices_env = None
    ray_resource = "accelrl_cpu"
    ray_noset_env = None
    train_backend = "gloo"
    weight_update_backend = "gloo"
    capabilities = Capabilities(
        exclusive_devices=False,
        host_memory=True,
        own_generator=False,
        bf16=True,
        fp16=True,
        amp=True,
        deterministic=True,
        safetensors_device=True,
    )
    priority = 0
    socket_ifname_env = "GLOO_SOCKET_IFNAME"
    env_prefixes = ("OMP_", "MKL_", "GOMP_", "GLOO_")
    per_node_env = ("GLOO_SOCKET_IFNAME",)
    # An idle scheduler would keep a core busy, which training needs.
    sglang_arguments = ("--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle")
    sglang_env = (("SGLANG_USE_CPU_ENGINE", "1"),)

    def __init__(self) -> None:
        self._index = 0

    def unavailable_reason(self) -> str | None:
        """Always usable, unless the number of devices asked for is none."""
        self.device_count()
        return None

    def device_count(self) -> int:
        """``ACCELRL_CPU_DEVICES``, or the cores that this process may use."""
        return devices_asked() or usable_cores()

    def set_device(self, index: int) -> None:
        self._index = self.check_index(index)

    def current_device(self) -> int:
        return self._index

    def device(self, index: int | None = None) -> torch.device:
        """Always plain ``cpu``: torch has one host memory, and some of its operators refuse a numbered one."""
        if index is not None:
            self.check_index(index)
        return torch.device(self.device_type)

    def more_devices_hint(self) -> str:
        return f"Host processors are shared, so any number can be presented: set {DEVICES_ENV}=N."

    def device_name(self, index: int) -> str:
        return f"{processor_name()}, place {index}"

    def synchronize(self, index: int | None = None) -> None:
        """Nothing is queued on a host processor."""

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        torch.default_generator.set_state(state)

    def memory_info(self, index: int | None = None) -> MemoryInfo:
        """Free and total of the machine; allocated and peak are this process's resident memory."""
        free, total = host_memory()
        per_unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit
        return MemoryInfo(free=free, total=total, allocated=resident_memory(), peak=peak)

    def empty_cache(self) -> None:
        """Give what the C library has kept of freed memory back to the system, where it is one that can (glibc)."""
        trim = _malloc_trim()
        if trim is not None:
            trim(0)

    def torch_namespace(self) -> Any:
        from accel.backends import cpu_namespace

        return cpu_namespace

    def worker_env(self, threads: int) -> dict[str, str]:
        """Idle OpenMP threads sleep: spinning ones slow two processes on two cores down five to ten times."""
        return super().worker_env(threads) | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def devices_asked(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number in ``ACCELRL_CPU_DEVICES``, or None when it is not set; AcceleratorError when it is none."""
    value = environ.get(DEVICES_ENV, "").strip()
    if not value:
        return None
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 6 else 0
    if not 1 <= number <= MOST_DEVICES:
        raise AcceleratorError(
            f"{DEVICES_ENV}={value[:20]!r}: give the number of devices to present, 1 or more and at most {MOST_DEVICES}"
        )
    return number


def usable_cores() -> int:
    """Cores in this process's affinity mask."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> tuple[int | None, int | None]:
    """Free and total bytes of this machine, within the control group's limit where there is one."""
    fields = _meminfo()
    if fields is None:
        return None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = fields["MemAvailable"], fields["MemTotal"]
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    if limit is not None and limit < total:
        used = _read_int(Path("/sys/fs/cgroup/memory.current")) or 0
        total, free = limit, min(free, max(limit - used, 0))
    return free, total


@cache
def _malloc_trim() -> Any | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_memory() -> int | None:
    """Bytes of this process in memory now; None where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def processor_name() -> str:
    """The processor's model as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def _meminfo() -> dict[str, int] | None:
    """/proc/meminfo in bytes."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    rows = (line.partition(":") for line in path.read_text().splitlines())
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in rows}


def _read_int(path: Path) -> int | None:
    """The number in a control file; None when the file is absent or says "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None
