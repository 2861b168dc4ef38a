"""How long prompts and responses may be: one place that decides, used where prompts are filtered and where served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import EvalConfig, RolloutConfig
from samples.config import TRAINING_FLAGS, DataConfig, PromptFlags
from samples.errors import InputError

_MOST_FACTOR = 2**20  # of a stretched context; far above any published model's


@dataclass(frozen=True)
class ContextLimits:
    """In tokens. A prompt of ``max_prompt_len`` leaves room for a full response within ``max_context_len``."""

    max_context_len: int
    max_prompt_len: int


def context_limits(model_dir: Path, rollout: RolloutConfig, data: DataConfig) -> ContextLimits:
    """Limits from flags and the model's ``max_position_embeddings``. Raises InputError when they leave no prompt."""
    context = _context_len(model_dir, rollout)
    return _limits(context, rollout.rollout_max_response_len, data.rollout_max_prompt_len, TRAINING_FLAGS)


def evaluation_limits(model_dir: Path, rollout: RolloutConfig, evaluation: EvalConfig) -> ContextLimits:
    """The same for evaluations, whose prompts and responses may be longer or shorter than training's."""
    context = _context_len(model_dir, rollout)
    response = evaluation.eval_max_response_len or rollout.rollout_max_response_len
    return _limits(context, response, evaluation.eval_max_prompt_len, evaluation_flags(evaluation))


def evaluation_flags(evaluation: EvalConfig) -> PromptFlags:
    """The flags that decide about the prompts of evaluations."""
    decides_length = "--eval-max-response-len" if evaluation.eval_max_response_len else TRAINING_FLAGS.response_len
    return PromptFlags("--eval-prompt-data", "--eval-max-prompt-len", decides_length, "--n-samples-per-eval-prompt")


def _context_len(model_dir: Path, rollout: RolloutConfig) -> int:
    config_file = model_dir / "config.json"
    described = json.loads(config_file.read_text(encoding="utf-8"))
    model_len = described.get("max_position_embeddings")
    if model_len is not None and (type(model_len) is not int or model_len < 1):
        raise InputError(f"{config_file}: max_position_embeddings={model_len!r} is not a number of tokens above 0")
    context = rollout.rollout_max_context_len or model_len
    if context is None:
        raise InputError(f"{config_file} has no max_position_embeddings: give --rollout-max-context-len")
    longest = None if model_len is None else max(model_len, _scaled_len(described))
    if longest is not None and context > longest:
        raise InputError(
            f"--rollout-max-context-len {context} is more than the model's max_position_embeddings {model_len}: "
            f"use at most {longest}"
        )
    return int(context)


def _scaled_len(described: dict[str, Any]) -> int:
    """What yarn stretches a model's context to, which publishers often leave out of max_position_embeddings; else 0."""
    rope = described.get("rope_parameters") or described.get("rope_scaling")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    factor, length = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(length, int) or not 1 <= factor <= _MOST_FACTOR:
        return 0
    return int(factor * length)


def _limits(context: int, response_len: int, prompt_len: int | None, flags: PromptFlags) -> ContextLimits:
    room = context - response_len
    if room < 1:
        raise InputError(
            f"{flags.response_len} {response_len} leaves no room for a prompt in a context of {context} tokens: use at "
            f"most {context - 1}"
        )
    if prompt_len is not None and prompt_len > room:
        raise InputError(
            f"{flags.prompt_len} {prompt_len} plus {flags.response_len} {response_len} is more than the context of "
            f"{context} tokens: use at most {room} for the prompt"
        )
    return ContextLimits(context, prompt_len or room)
