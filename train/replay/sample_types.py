"""Types of a sample that comes from a file: what has another one would fail in the middle of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Check = Callable[[Any], bool]


def check_sample(values: object) -> None:
    """Raise TypeError, naming the field, unless ``values`` can be a sample's fields. Lengths are training's concern."""
    if not isinstance(values, dict):
        raise TypeError("not a mapping")
    for name, (holds, what) in _FIELDS.items():
        if name in values and not holds(values[name]):
            raise TypeError(f"{name} is not {what}")


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(holds: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_whole, value)) and value[1] > 0


def _optional(holds: _Check) -> _Check:
    return lambda value: value is None or holds(value)


_VERSIONS = ("weight_version", "last_weight_version")
_FIELDS: dict[str, tuple[_Check, str]] = {
    "prompt": (lambda value: _text(value) or _list_of(_mapping)(value), "text or a list of messages"),
    "tokens": (_list_of(_whole), "a list of token ids"),
    "response": (_text, "text"),
    "response_length": (_whole, "a whole number"),
    "reward": (_optional(lambda value: _number(value) or _mapping(value)), "a number or a mapping"),
    "loss_mask": (_optional(_list_of(_number)), "a list of numbers"),
    "rollout_log_probs": (_optional(_list_of(_number)), "a list of numbers"),
    "rollout_kept_token_ids": (_optional(_list_of(_list_of(_whole))), "lists of token ids"),
    "weight_version_spans": (_optional(_list_of(_pair)), "pairs of a version and a number of tokens"),
    "source": (_optional(_text), "text"),
    "session_id": (_optional(_text), "text"),
    "reward_adjustment": (_number, "a number"),
    "remove_sample": (lambda value: isinstance(value, bool), "true or false"),
    "metadata": (_mapping, "a mapping"),
} | {
    name: (_optional(_whole), "a whole number")
    for name in ("index", "group_index", "rollout_id", "train_step", "prompt_row", "epoch", *_VERSIONS)
}
