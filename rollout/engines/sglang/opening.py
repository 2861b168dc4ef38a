"""From a run's settings to an engine of SGLang servers, not started yet."""

from __future__ import annotations

from pathlib import Path

import torch

from accel.contract import Accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import ServerChannel, SGLangConfig
from rollout.deploy.hosts import Spawner
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.layout import Layout
from rollout.engines.sglang.command import ServerSettings
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.torch_engine.opening import open_config

_HOST_CACHE_TOKENS = 65536  # of a KV cache in host memory, whose free part SGLang does not measure


def open_servers(
    config: RolloutConfig,
    sglang: SGLangConfig,
    layout: Layout,
    accelerator: Accelerator,
    *,
    model_dir: Path,
    dtype: torch.dtype,
    max_context_len: int,
    load_weights: bool,
    seed: int,
    threads: int,
    trust_remote_code: bool,
    weight_channel: ServerChannel = "disk",
    spawner: Spawner | None = None,
    frees_memory: bool = False,
) -> SGLangEngine:
    """Raises InputError where there is no Python with SGLang."""
    max_total_tokens = config.engine_max_total_tokens
    if max_total_tokens is None and not accelerator.capabilities.exclusive_devices:
        max_total_tokens = min(config.engine_max_running_requests * max_context_len, _HOST_CACHE_TOKENS)
    assert sglang.sglang_log_dir is not None, "the run resolves it"
    settings = ServerSettings(
        model_dir=model_dir,
        dtype=dtype,
        max_context_len=max_context_len,
        max_running_requests=config.engine_max_running_requests,
        max_total_tokens=max_total_tokens,
        load_weights=load_weights,
        seed=seed,
        threads=threads,
        vocab_size=int(open_config(model_dir, trust_remote_code).get_text_config().vocab_size),
        trust_remote_code=trust_remote_code,
        pause_mode=config.pause_mode,
        memory_saver=frees_memory,
    )
    return SGLangEngine(
        layout,
        settings,
        sglang,
        accelerator,
        python=sglang_python(sglang.sglang_python),
        log_dir=Path(sglang.sglang_log_dir),
        weight_channel=weight_channel,
        spawner=spawner,
    )
