"""``~`` in the paths of a configuration: a shell leaves it alone after ``=``, in lists and in files."""

from __future__ import annotations

import os
from typing import TypeVar

from train.config.run import RunConfig

Value = TypeVar("Value")

# Section -> its fields that are paths, or lists with paths among their words (a name is left as it is).
_PATHS = {
    "model": ("hf_checkpoint", "ref_load"),
    "data": ("prompt_data",),
    "evaluation": ("eval_prompt_data",),
    "reward": ("user_code_dir",),
    "sglang": ("sglang_config",),
    "output": ("output_dir", "save_hf"),
    "checkpoint": ("save", "load"),
    "offload": ("offload_dir",),
    "debug": ("save_debug_rollout_data", "load_debug_rollout_data"),
}


def expand_home(config: RunConfig) -> RunConfig:
    """``config`` with every leading ``~`` or ``~user`` of a path replaced; an unknown user's stays as it is."""
    sections = {}
    for section, fields in _PATHS.items():
        values = getattr(config, section)
        changed = {name: _expanded(value) for name, value in values if name in fields and value}
        if changed != {name: value for name, value in values if name in changed}:
            sections[section] = values.model_copy(update=changed)
    return config.model_copy(update=sections) if sections else config


def _expanded(value: Value) -> Value:
    if isinstance(value, str):
        return os.path.expanduser(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_expanded(word) for word in value)  # type: ignore[return-value]
    return value
