"""Makes the engine that answers requests."""

from __future__ import annotations

from pathlib import Path

import torch

from accel.contract import Accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import ServerChannel, SGLangConfig
from rollout.deploy.hosts import Spawner
from rollout.deploy.layout import Layout
from rollout.engines.choice import choose_engine
from rollout.engines.protocol import Engine


def create_engine(
    config: RolloutConfig,
    model_dir: Path,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype,
    max_context_len: int,
    threads: int,
    load_weights: bool,
    seed: int,
    sglang: SGLangConfig,
    layout: Layout,
    trust_remote_code: bool = False,
    weight_channel: ServerChannel = "disk",
    spawner: Spawner | None = None,
    frees_memory: bool = False,
) -> Engine:
    """The engine that ``--rollout-engine`` names, not started yet. ``sglang``, ``layout``, ``weight_channel``,
    ``spawner`` (None: this machine) and ``frees_memory`` (they start with the memory saver) are those of servers."""
    if choose_engine(config)[0] == "sglang":
        from rollout.engines.sglang.opening import open_servers

        return open_servers(
            config,
            sglang,
            layout,
            accelerator,
            model_dir=model_dir,
            dtype=dtype,
            max_context_len=max_context_len,
            load_weights=load_weights,
            seed=seed,
            threads=threads,
            trust_remote_code=trust_remote_code,
            weight_channel=weight_channel,
            spawner=spawner,
            frees_memory=frees_memory,
        )
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
        pause_mode=config.pause_mode,
    )
