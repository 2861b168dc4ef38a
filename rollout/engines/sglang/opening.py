"""From a run's settings to an engine of SGLang servers, not started yet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from accel.contract import Accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import ServerChannel, SGLangConfig
from rollout.deploy.disaggregation import transfer_problem
from rollout.deploy.hosts import Spawner
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.layout import Layout, ModelPlan
from rollout.engines.protocol import Engine
from rollout.engines.sglang.command import ServerSettings
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.several import SGLangModels
from rollout.engines.torch_engine.opening import open_config
from samples.errors import InputError

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
) -> SGLangEngine | SGLangModels:
    """Raises InputError where there is no Python with SGLang, and for a layout that cannot run on this accelerator."""
    exclusive = accelerator.capabilities.exclusive_devices
    problem = transfer_problem(layout, exclusive_devices=exclusive, accelerator=accelerator.name)
    if problem is not None:
        raise InputError(problem)
    assert sglang.sglang_log_dir is not None, "the run resolves it"
    python, log_dir = sglang_python(sglang.sglang_python), Path(sglang.sglang_log_dir)
    trained = next(model for model in layout.models if model.updates_weights)

    def opened(model: ModelPlan) -> SGLangEngine:
        """Addresses that flags give for a router are those of the model that is trained."""
        directory = model_dir if model.model_path is None else Path(model.model_path)
        context = max_context_len if model.model_path is None else own_context_len(directory, max_context_len)
        max_total_tokens = config.engine_max_total_tokens
        if max_total_tokens is None and not exclusive:
            max_total_tokens = min(config.engine_max_running_requests * context, _HOST_CACHE_TOKENS)
        settings = ServerSettings(
            model_dir=directory,
            dtype=dtype,
            max_context_len=context,
            max_running_requests=config.engine_max_running_requests,
            max_total_tokens=max_total_tokens,
            load_weights=load_weights,
            seed=seed,
            threads=threads,
            vocab_size=int(open_config(directory, trust_remote_code).get_text_config().vocab_size),
            trust_remote_code=trust_remote_code,
            pause_mode=config.pause_mode,
            memory_saver=frees_memory,
            needs_kept_ids=model is trained and (config.rollout_top_p < 1 or config.rollout_top_k > 0),
        )
        ours = {"sglang_router_ip": None, "sglang_router_port": None, "router_prometheus_port": None}
        return SGLangEngine(
            replace(layout, models=(model,)),
            settings,
            sglang if model is trained else sglang.model_copy(update=ours),
            accelerator,
            python=python,
            log_dir=log_dir,
            weight_channel=weight_channel,
            spawner=spawner,
        )

    engines = {model.name: opened(model) for model in layout.models}
    if len(engines) == 1:
        return engines[trained.name]
    updated = [engines[model.name] for model in layout.models if model.updates_weights]
    return SGLangModels(list(engines.values()), updated)


def model_routers(engine: Engine) -> dict[str, tuple[str, int]]:
    """(host, port) of each model's router by the model's name, of an engine that ``open_servers`` made."""
    assert isinstance(engine, SGLangEngine | SGLangModels)
    return engine.model_routers


def check_described_models(layout: Layout, trust_remote_code: bool) -> None:
    """InputError for a ``model_path`` that holds no model."""
    for model in layout.models:
        if model.model_path is not None:
            try:
                own_context_len(Path(model.model_path), 1)
                open_config(Path(model.model_path), trust_remote_code)
            except InputError as error:
                raise InputError(f"model {model.name}: {error}") from error


def own_context_len(model_dir: Path, asked: int) -> int:
    """Tokens that a model beside the trained one takes: as many as the run asks for, if it has them."""
    file = model_dir / "config.json"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}; model_path is a Hugging Face model directory") from error
    most = described.get("text_config", described).get("max_position_embeddings")
    return asked if most is None else min(asked, int(most))
