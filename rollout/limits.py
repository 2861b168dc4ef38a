"""How long prompts and responses may be: one place that decides, used where prompts are filtered and where served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollout.config import RolloutConfig
from samples.config import DataConfig
from samples.errors import InputError


@dataclass(frozen=True)
class ContextLimits:
    """In tokens. A prompt of ``max_prompt_len`` leaves room for a full response within ``max_context_len``."""

    max_context_len: int
    max_prompt_len: int


def context_limits(model_dir: Path, rollout: RolloutConfig, data: DataConfig) -> ContextLimits:
    """Limits from flags and the model's ``max_position_embeddings``. Raises InputError when they leave no prompt."""
    config_file = model_dir / "config.json"
    model_len = json.loads(config_file.read_text(encoding="utf-8")).get("max_position_embeddings")
    context = rollout.rollout_max_context_len or model_len
    if context is None:
        raise InputError(f"{config_file} has no max_position_embeddings: give --rollout-max-context-len")
    if model_len is not None and context > model_len:
        raise InputError(
            f"--rollout-max-context-len {context} is more than the model's max_position_embeddings {model_len}: "
            f"use at most {model_len}"
        )
    room = context - rollout.rollout_max_response_len
    if room < 1:
        raise InputError(
            f"--rollout-max-response-len {rollout.rollout_max_response_len} leaves no room for a prompt in a context of "
            f"{context} tokens: use at most {context - 1}"
        )
    longest = data.rollout_max_prompt_len
    if longest is not None and longest > room:
        raise InputError(
            f"--rollout-max-prompt-len {longest} plus --rollout-max-response-len {rollout.rollout_max_response_len} is "
            f"more than the context of {context} tokens: use at most {room} for the prompt"
        )
    return ContextLimits(context, longest or room)
