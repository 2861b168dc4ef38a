"""The one place that decides which engine answers requests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import torch

from accel.contract import Accelerator
from rollout.config import RolloutConfig
from rollout.engines.protocol import Engine
from samples.errors import InputError


def choose_engine(config: RolloutConfig) -> tuple[Literal["torch"], str]:
    """The engine's name and why it was chosen. Raises InputError for one that is not there."""
    if config.rollout_engine == "torch":
        return "torch", "asked for by --rollout-engine"
    installed = importlib.util.find_spec("sglang") is not None
    if config.rollout_engine == "sglang":
        raise InputError(
            "--rollout-engine sglang: this version serves rollouts with the embedded engine only; "
            "use --rollout-engine torch"
        )
    return "torch", "SGLang is installed but not served by this version" if installed else "no SGLang is installed"


def create_engine(
    config: RolloutConfig,
    model_dir: Path,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype,
    max_context_len: int,
    threads: int,
    load_weights: bool,
    trust_remote_code: bool = False,
) -> Engine:
    """The engine that ``--rollout-engine`` names, not started yet."""
    choose_engine(config)
    from rollout.engines.torch_engine import TorchEngine

    return TorchEngine(
        model_dir,
        accelerator,
        dtype=dtype,
        max_running_requests=config.engine_max_running_requests,
        max_context_len=max_context_len,
        max_total_tokens=config.engine_max_total_tokens,
        load_weights=load_weights,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
