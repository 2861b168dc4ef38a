"""NVIDIA's CUDA, and AMD's ROCm, which torch builds under the same device type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from accel.backends.torch_device import TorchAccelerator
from accel.contract import Accelerator, Capabilities


class CudaAccelerator(TorchAccelerator):
    """NVIDIA GPUs."""

    name = "cuda"
    device_type = "cuda"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    train_backend = "nccl"
    weight_update_backend = "nccl"
    capabilities = Capabilities(
        streams=True,
        events=True,
        bf16=True,
        fp16=True,
        amp=True,
        deterministic=True,
        pinned_memory=True,
        memory_stats=True,
        memory_snapshot=True,
        oom_observer=True,
        memory_saver=True,
        ipc=True,
        process_group_reload=True,
        process_group_device_id=True,
        uneven_all_gather=True,
        expandable_segments=True,
        init_on_device=True,
        safetensors_device=True,
        flash_attention=True,
        grouped_gemm=True,
        triton=True,
        deep_ep=True,
    )
    lower_masks: ClassVar[tuple[str, ...]] = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    socket_ifname_env = "NCCL_SOCKET_IFNAME"
    allocator_env = "PYTORCH_CUDA_ALLOC_CONF"
    deterministic_env: ClassVar[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    profiler_activity = "CUDA"
    monitor_package: ClassVar[str | None] = "nvidia-ml-py"
    env_prefixes: ClassVar[tuple[str, ...]] = ("CUDA_", "NCCL_", "NVIDIA_", "PYTORCH_CUDA_")
    per_node_env = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME")

    def unavailable_reason(self) -> str | None:
        if not torch.backends.cuda.is_built():
            return (
                f"torch {torch.__version__} is built without CUDA and ROCm: install a build with one of them "
                "(https://pytorch.org/get-started)"
            )
        if not torch.cuda.is_available():
            seen = (
                f" ({self.visible_devices_env}={self.visible_devices()})" if self.visible_devices() is not None else ""
            )
            return (
                f"torch is built with {self.runtime_version()} but sees no device{seen}: check the driver and the mask"
            )
        return None

    def device_uuid(self, index: int) -> str | None:
        """As the visible-devices list and nvidia-smi spell it."""
        uuid = super().device_uuid(index)
        return None if uuid is None else f"GPU-{uuid.removeprefix('GPU-')}"

    def attach_oom_observer(self, observer: Callable[[int, int, int, int], None]) -> None:
        torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined] # in CUDA builds only

    def runtime_version(self) -> str | None:
        return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


class RocmAccelerator(CudaAccelerator):
    """AMD GPUs. torch calls them ``cuda``; the masks, the interconnect's features and the kernels differ."""

    visible_devices_env = "HIP_VISIBLE_DEVICES"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"
    capabilities = dataclasses.replace(
        CudaAccelerator.capabilities, init_on_device=False, grouped_gemm=False, deep_ep=False
    )
    same_masks = ("CUDA_VISIBLE_DEVICES",)
    stand_in_mask = "CUDA_VISIBLE_DEVICES"
    lower_masks = ("ROCR_VISIBLE_DEVICES",)
    allocator_env = "PYTORCH_HIP_ALLOC_CONF"
    deterministic_env: ClassVar[Mapping[str, str]] = {}
    monitor_package = "amdsmi"
    env_prefixes = ("CUDA_", "HIP_", "ROCR_", "HSA_", "NCCL_", "RCCL_", "PYTORCH_HIP_", "PYTORCH_CUDA_")

    def runtime_version(self) -> str | None:
        return f"ROCm {torch.version.hip}" if torch.version.hip else None


def cuda_accelerator() -> Accelerator:
    """The class that fits this build of torch."""
    return RocmAccelerator() if torch.version.hip else CudaAccelerator()
