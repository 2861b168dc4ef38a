"""Stands in for Moore Threads' torch_musa where there is no MUSA hardware: its names, on an emulated device.

Where it differs from the real one: the allocator keeps no cache (reserved is allocated), generators have no offset,
there are no graphs, memory pools or IPC handles, and kernels are done when their call returns.
"""

# ruff: noqa: E402, F401 - the device has its name before anything below can name it; the rest is the public surface

from __future__ import annotations

import sys

import torch

if __name__ != "torch_musa":
    raise ImportError("the stand-in is loaded as torch_musa, by accel.emulation.loading.load_emulation()")

torch.utils.rename_privateuse1_backend("musa")
torch.utils.generate_methods_for_privateuse1_backend()
torch._register_device_module("musa", sys.modules[__name__])
torch.version.musa = "emulated"  # type: ignore[attr-defined]

from torch_musa import amp, collectives, core, memory, random, streams
from torch_musa.device import (
    _exchange_device,
    _get_device_index,
    _is_in_bad_fork,
    _lazy_call,
    _lazy_init,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_bf16_supported,
    is_initialized,
    set_device,
    synchronize,
)
from torch_musa.memory import (
    OutOfMemoryError,
    empty_cache,
    ipc_collect,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
)
from torch_musa.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_musa.streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream

__version__ = f"{torch.__version__.partition('+')[0]}+emulated"

# As torch.cuda has them.
FloatTensor = torch.FloatTensor
DoubleTensor = torch.DoubleTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
ByteTensor = torch.ByteTensor
CharTensor = torch.CharTensor
ShortTensor = torch.ShortTensor
IntTensor = torch.IntTensor
LongTensor = torch.LongTensor
BoolTensor = torch.BoolTensor


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast asks a device module for."""
    return [torch.float16, torch.bfloat16]


collectives.register()
