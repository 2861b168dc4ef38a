"""What a reward function may return: a finite number, or a mapping with one under ``--reward-key``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch

from samples.errors import InputError
from samples.sample import Reward as RewardValue


def as_number(value: object) -> float | None:
    """``value`` as a float when it is a number (bool, int, float, NumPy scalar, 0-d array or tensor), else None."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        if value.ndim != 0:
            return None
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of a float
        return math.inf


def checked_reward(value: object, name: str, index: int | None, reward_key: str | None) -> RewardValue:
    """``value`` as a sample keeps it, or ``InputError`` naming the reward, the sample and the value."""
    if isinstance(value, Mapping):
        return _checked_mapping(value, name, index, reward_key)
    return _finite(value, f"{name} returned {_shown(value)} for sample {index}")


def _checked_mapping(value: Mapping[Any, Any], name: str, index: int | None, reward_key: str | None) -> dict[str, Any]:
    keys = ", ".join(repr(key) for key in list(value)[:20]) or "none"
    if reward_key is None:
        raise InputError(
            f"{name} returned a mapping for sample {index}, with the keys {keys}: "
            "say with --reward-key which of them is trained on"
        )
    if reward_key not in value:
        raise InputError(
            f"{name} returned a mapping without the --reward-key {reward_key!r} for sample {index}; its keys are {keys}"
        )
    plain: dict[str, Any] = {}
    for key, entry in value.items():
        number = as_number(entry)
        plain[str(key)] = entry if number is None else number
    plain[reward_key] = _finite(
        value[reward_key], f"{name} returned {_shown(value[reward_key])} as {reward_key!r} for sample {index}"
    )
    return plain


def _finite(value: object, told: str) -> float:
    number = as_number(value)
    if number is None:
        raise InputError(f"{told}: a reward is a number, or a mapping with one under --reward-key")
    if not math.isfinite(number):
        raise InputError(
            f"{told}: a reward must be finite; return a number such as 0.0 for a response that cannot be scored"
        )
    return number


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 200 else text[:200] + "..."
    return f"{text} ({type(value).__name__})"
