"""Servers that somebody else started: whether they serve this run's model, as this run needs it."""

from __future__ import annotations

import json

from rollout.engines.pausing import PauseMode
from rollout.engines.sglang.command import SAMPLING_MASK_TOKENS, ServerSettings
from rollout.engines.sglang.server import SGLangServer
from samples.errors import InputError

EXTERNAL_FLAG = "--rollout-external-engine-addrs"


async def check_adopted(server: SGLangServer, settings: ServerSettings, tensor_parallel_size: int) -> None:
    """Raises InputError naming the address, what the server has and what the run needs."""
    model, info = await server.model_info(), await server.server_info()
    ours = json.loads((settings.model_dir / "config.json").read_text(encoding="utf-8"))
    for name in ("model_type", "architectures"):
        if model.get(name) != ours.get(name):
            raise InputError(
                f"{server.name} serves {model.get('model_path')} with {name} {model.get(name)!r}, --hf-checkpoint "
                f"{settings.model_dir} has {ours.get(name)!r}; start it with this model"
            )
    context = info.get("context_length")
    if context is not None and int(context) < settings.max_context_len:
        raise InputError(
            f"{server.name} has a context of {context} tokens, the run needs {settings.max_context_len}; start it with "
            "a larger --context-length, or give --rollout-max-context-len"
        )
    if settings.pause_mode is PauseMode.IN_PLACE and info.get("disable_radix_cache") is not True:
        raise InputError(
            f"{server.name} keeps a prefix cache, which --pause-generation-mode in_place would leave full of keys and "
            "values of older weights; start it with --disable-radix-cache, or use retract"
        )
    if server.tensor_parallel_size != tensor_parallel_size:
        raise InputError(
            f"{server.name} has tensor parallel size {server.tensor_parallel_size}, --rollout-num-gpus-per-engine says "
            f"{tensor_parallel_size}; give {server.tensor_parallel_size}"
        )
    if settings.needs_kept_ids:
        needed, there = min(SAMPLING_MASK_TOKENS, settings.vocab_size), info.get("sampling_mask_max_tokens") or 0
        if int(there) < needed:
            raise InputError(
                f"{server.name} gives the ids of at most {there} tokens that --rollout-top-p or --rollout-top-k kept, "
                f"and training needs them all: start it with --sampling-mask-max-tokens {needed}, or leave both out"
            )
