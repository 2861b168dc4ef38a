"""Brings Megatron-Core up on the selected accelerator: the import hook, and what it lacks without TransformerEngine."""

from __future__ import annotations

import copy
import importlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import accel.retarget
from accel.contract import Accelerator


def prepare_megatron(accelerator: Accelerator, extra_modules: Sequence[str] = ()) -> None:
    """Import ``megatron.core`` pointed at ``accelerator``, with its gaps closed. Call first in every training process.

    ``extra_modules``: dotted prefixes of model code of the user's that says CUDA too. Calling it again is fine.
    Raises AcceleratorError when ``megatron.core`` or such a module is already imported, or its version is not known.
    """
    _quiet_fallback_notices()
    # For devices that are not CUDA: the hook calls these for no other.
    patches: dict[str, Callable[[Any], None]] = {
        "megatron.core.jit": _leave_functions_uncompiled,
        "megatron.core.tensor_parallel.layers": _quiet_cuda_advice,
        "megatron.core.transformer.moe.token_dispatcher": _read_splits_on_host,
    }
    if not accelerator.capabilities.own_generator:
        patches["megatron.core.tensor_parallel.random"] = _quiet_host_generator_alarm
    accel.retarget.install(accelerator, extra_modules=extra_modules, after_import=patches)
    with _without_wandb():
        _define_missing_gemm(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
        _admit_missing_linear(importlib.import_module("megatron.core.transformer.multi_latent_attention"))
        _allow_sequence_parallel_norms(importlib.import_module("megatron.core.transformer.torch_norm"))


@contextmanager
def _without_wandb() -> Iterator[None]:
    # Megatron imports wandb where it is installed, used or not. That costs half a second, and two temporary directories
    # that a process leaves behind when it is killed, as a Ray worker is.
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


def _quiet_fallback_notices() -> None:
    # A dozen modules say at import that they do without Apex; one warns of the default of its own configuration.
    for notice in (r".*Apex (is|are) not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=notice, module=r"megatron\.core\.")
    # Of experts, which are whole on their rank and so leave sequence parallelism out.
    warnings.filterwarnings("ignore", message=r"`sequence_parallel` is set to `True`, but tensor model parallel size")
    # Its optimizer looks at .grad of the views that the distributed optimizer steps on, which torch advises against,
    # and calls collectives by the names that torch 2.13 has since renamed.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _leave_functions_uncompiled(jit: Any) -> None:
    # Megatron hands its small fused functions to torch.compile, which fits CUDA. Elsewhere it costs every process a
    # second of imports, then a compilation at the first step, and rounds otherwise than the device's own kernels.
    jit.disable_jit_fuser()


def _quiet_cuda_advice(layers: Any) -> None:
    # Speed advice at the first backward pass about a variable that only the CUDA driver reads.
    warnings.filterwarnings("ignore", message=r".*CUDA_DEVICE_MAX_CONNECTIONS", module=re.escape(layers.__name__))


def _quiet_host_generator_alarm(random: Any) -> None:
    # A forked random state warns when the host's generator moved meanwhile; on the host that is the one it forked.
    logging.getLogger(random.__name__).addFilter(_is_no_generator_alarm)


def _is_no_generator_alarm(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in str(record.msg)


def _read_splits_on_host(token_dispatcher: Any) -> None:
    # The original moves a tensor only if `.is_cuda`; on any other device the dispatcher goes on to use token counts as
    # NumPy arrays and as plain numbers that are still tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = move_to_host


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """``maybe_move_tensor_to_cpu`` for a tensor on any device; what is no tensor is returned as it is.

    The copy is waited for, so ``record_stream``, which keeps memory alive while nobody waits, has nothing to do.
    """
    del record_stream
    if not torch.is_tensor(tensor):
        return tensor
    host = tensor.to("cpu")
    return host.numpy() if as_numpy else host


def _define_missing_gemm(moe_utils: Any) -> None:
    # 0.16.1 compares this name with None in the router, and without TransformerEngine never defines it: a NameError.
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def _admit_missing_linear(latent_attention: Any) -> None:
    # 0.16.1 takes TransformerEngine for present when names of its layers can be imported; without it they are mocks.
    extensions = importlib.import_module("megatron.core.extensions.transformer_engine")
    latent_attention.HAVE_TE = extensions.HAVE_TE


def _allow_sequence_parallel_norms(torch_norm: Any) -> None:
    # Under sequence parallelism a norm sees a slice of the sequence, so its weight's gradient is one part of a sum over
    # the tensor-parallel group. finalize_model_grads adds up the parts of each parameter that says `sequence_parallel`:
    # that is all that TransformerEngine's norms do about it, and the lack of it is why the torch norms refuse.
    wrapper = torch_norm.WrappedTorchNorm
    original = wrapper.__new__
    if original.__module__ == __name__:
        return

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    # Inside the class, because specs and blocks have imported it under several names by now.
    wrapper.__new__ = staticmethod(build)
