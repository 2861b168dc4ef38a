"""Moore Threads' MUSA, through torch_musa."""

from __future__ import annotations

import importlib.util

import torch

from accel.backends.musa_bootstrap import bootstrap, musa_route
from accel.backends.torch_device import TorchAccelerator
from accel.contract import Accelerator, Capabilities


class MusaAccelerator(TorchAccelerator):
    """Moore Threads GPUs. torch_musa is imported when this backend is probed or selected, and at no other time."""

    name = "musa"
    device_type = "musa"
    visible_devices_env = "MUSA_VISIBLE_DEVICES"
    ray_resource = "MUSA"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES"
    train_backend = "mccl"
    weight_update_backend = "cpu:gloo,musa:mccl"
    capabilities = Capabilities(
        streams=True,
        events=True,
        bf16=True,
        fp16=True,
        amp=True,
        pinned_memory=True,
        memory_stats=True,
        ipc=True,
        process_group_reload=True,
        safetensors_device=True,
    )
    torch_plugin = "torch_musa"
    same_masks = ("CUDA_VISIBLE_DEVICES",)
    socket_ifname_env = "MCCL_SOCKET_IFNAME"
    allocator_env = "PYTORCH_MUSA_ALLOC_CONF"
    profiler_activity = "PrivateUse1"
    monitor_package = "mthreads-ml-py"
    env_prefixes = ("MUSA_", "MCCL_", "MTHREADS_", "PYTORCH_MUSA_")
    per_node_env = ("MCCL_SOCKET_IFNAME", "MCCL_IB_HCA", "GLOO_SOCKET_IFNAME")

    def redirects_cuda(self) -> bool:
        return musa_route() == "torchada"

    def emulation(self) -> Accelerator:
        from accel.emulation.backend import EmulatedMusaAccelerator

        return EmulatedMusaAccelerator()

    def prepare(self) -> None:
        bootstrap()
        super().prepare()

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("torch_musa") is None:
            return (
                "torch_musa is not installed: install Moore Threads' build for torch "
                f"{torch.__version__} (https://github.com/MooreThreads/torch_musa)"
            )
        return super().unavailable_reason()

    def runtime_version(self) -> str | None:
        version = getattr(torch.version, "musa", None)
        return f"MUSA {version}" if version else None


def musa_accelerator() -> Accelerator:
    """The hardware, or its emulation where ``ACCELRL_EMULATE_MUSA=1`` asks for it."""
    from accel.emulation.settings import emulation_asked

    return MusaAccelerator().emulation() if emulation_asked() else MusaAccelerator()
