"""What SGLang needs of its kernel library to serve dense models on a processor, where the library has no wheel.

SGLang imports names that end in ``_cpu`` for every model and calls only those of the model it serves. The one that
every model calls is here; any other can be imported, and raises when it is called. Names of GPU kernels are not there
at all, as SGLang expects on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10+cpu.shim"


def assign_req_to_token_pool_cpu(
    request_slots: torch.Tensor,
    token_table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    cache_places: torch.Tensor,
    *_: Any,
) -> None:
    """Enter the cache places of new tokens into the table: row ``request_slots[i]``, columns ``starts[i]:ends[i]``.

    ``cache_places`` holds the places of all requests one after the other.
    """
    taken = 0
    for slot, start, end in zip(request_slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        token_table[slot, start:end] = cache_places[taken : taken + count].to(token_table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name}: this CPU environment serves dense models only and has no such kernel")

    missing.__name__ = name
    return missing
