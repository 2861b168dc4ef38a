"""The command line and environment of one SGLang server, from a plan and the run's settings; nothing is started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.contract import Accelerator
from rollout.deploy.addresses import bracketed
from rollout.deploy.config import SGLangConfig
from rollout.deploy.disaggregation import Ports, role_arguments
from rollout.deploy.layout import EnginePlan
from rollout.deploy.overrides import checked_overrides, run_overrides
from rollout.engines.pausing import PauseMode
from samples.errors import InputError

SAMPLING_MASK_TOKENS = 1024  # at most so many tokens may be left by top-p and top-k, where their ids are asked for


@dataclass(frozen=True)
class ServerSettings:
    """What all servers of a model have in common. ``max_total_tokens``: of the KV cache (None: SGLang decides)."""

    model_dir: Path
    dtype: torch.dtype
    max_context_len: int
    max_running_requests: int
    max_total_tokens: int | None
    load_weights: bool
    seed: int
    threads: int
    vocab_size: int
    trust_remote_code: bool = False
    pause_mode: PauseMode = PauseMode.RETRACT
    memory_saver: bool = False  # weights and cache can be given back while the server runs
    needs_kept_ids: bool = False  # top-p or top-k leave tokens out whose absence training has to know of


def server_command(
    python: Path,
    plan: EnginePlan,
    settings: ServerSettings,
    config: SGLangConfig,
    accelerator: Accelerator,
    *,
    host: str,
    ports: Ports,
    node_rank: int = 0,
    group_host: str | None = None,
    first_device: int | None = None,
    encoders: Sequence[str] = (),
) -> list[str]:
    """The command line of the engine's part on node ``node_rank`` of those it spans; ``group_host`` is its first node,
    ``encoders`` are the addresses of its model's encoder servers.

    ``first_device``: of the devices that the process sees, where they are not those of the plan.
    Later ones win: the accelerator's arguments, the run's settings, ``--sglang-overrides``, the group's overrides.
    """
    arguments: dict[str, Any] = {
        "model_path": plan.model_path or str(settings.model_dir),
        "host": host,
        "port": ports.http,
        "dist_init_addr": f"{bracketed(group_host or host)}:{ports.group}",
        "device": accelerator.device_type,
        "tp_size": plan.num_devices,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "context_length": settings.max_context_len,
        "max_running_requests": settings.max_running_requests,
        "random_seed": settings.seed,
        "log_level": "info" if config.router_log_requests else config.sglang_log_level,
        "sampling_mask_max_tokens": min(SAMPLING_MASK_TOKENS, settings.vocab_size),
        "skip_server_warmup": True,
    }
    if settings.max_total_tokens is not None:
        arguments["max_total_tokens"] = settings.max_total_tokens
    if settings.trust_remote_code:
        arguments["trust_remote_code"] = True
    if settings.pause_mode is PauseMode.IN_PLACE:
        arguments["disable_radix_cache"] = True  # it cannot be flushed under requests that go on, and would grow stale
    if not settings.load_weights and plan.updates_weights:
        arguments["load_format"] = "dummy"  # the trainer's weights come before the first request
    if settings.memory_saver:
        arguments["enable_memory_saver"] = True
    if config.router_log_requests:
        arguments["log_requests"] = True
    if accelerator.capabilities.exclusive_devices:
        arguments["base_gpu_id"] = plan.shares[node_rank].devices[0] if first_device is None else first_device
    if len(plan.shares) > 1:
        arguments |= {"nnodes": len(plan.shares), "node_rank": node_rank}
    arguments |= role_arguments(plan, ports, encoders)
    where = f"overrides of group {plan.group} of model {plan.model}"
    given = run_overrides(config) | checked_overrides(plan.overrides, where)
    _check_bounds(given, arguments, where if plan.overrides else "--sglang-overrides")
    arguments |= given
    if settings.pause_mode is PauseMode.IN_PLACE and not arguments["disable_radix_cache"]:
        raise InputError(
            "disable_radix_cache=false among SGLang's arguments: --pause-generation-mode in_place would leave the "
            "prefix cache full of keys and values of older weights; leave it out, or use retract"
        )
    command = [str(python), "-m", "sglang.launch_server", *accelerator.sglang_arguments]
    for name, value in arguments.items():
        command += _as_flag(name, value)
    return command


def _check_bounds(given: Mapping[str, Any], needed: Mapping[str, Any], where: str) -> None:
    """Of what requests count on, an override may give more, never less."""
    for name in ("context_length", "sampling_mask_max_tokens"):
        if name not in given:
            continue
        try:
            enough = int(given[name]) >= needed[name]
        except (TypeError, ValueError):
            enough = False
        if not enough:
            raise InputError(f"{where}: {name} {given[name]} is less than the run needs, {needed[name]}; leave it out")


def server_environment(accelerator: Accelerator, settings: ServerSettings) -> dict[str, str]:
    """Variables of a server beside those of this process."""
    environment = accelerator.worker_env(settings.threads) | dict(accelerator.sglang_env)
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    # Longer than any pause between two rollouts: the router would send a request on a connection that is just closed.
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "86400"
    if accelerator.sglang_platform is not None:
        environment["SGLANG_PLATFORM"] = accelerator.sglang_platform
    return environment


def _as_flag(name: str, value: Any) -> list[str]:
    """``--name value``; a switch alone for true, nothing for false and none."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *(_word(item) for item in value)]
    return [flag, _word(value)]


def _word(value: Any) -> str:
    """As SGLang reads it: a table as JSON."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
