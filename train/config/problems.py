"""Says what is wrong with a value: where it was given, what it was, what may stand there and how to get there."""

from __future__ import annotations

from collections.abc import Sequence

from samples.errors import InputError
from train.config.flags import NONE, Flag

# Why a bound is there, for those that people run into.
_REASONS = {
    "rollout_temperature": "greedy responses of a group are all alike, which leaves nothing to learn; 1.0 is usual",
    "n_samples_per_prompt": "a group is the responses to one prompt, which are compared; 8 or 16 is usual",
    "rollout_batch_size": "a step needs at least one prompt",
    "eps_clip": "the ratio is clipped to 1 - this; 0.2 is usual",
    "lr": "1e-6 is usual for a pretrained model",
}

# Values that slime takes and we do not (or not under that name).
_VALUES = {
    ("rollout_mode", "fully_async"): "use fully-async",
    ("rollout_mode", "async"): "use one-step-off, as slime's train_async.py does, or fully-async",
    ("kl_loss_type", "low_var_kl"): "use k3, which is the same estimator",
    ("loss_aggregation", "sample-mean"): "use sequence-mean",
    ("lr_decay_style", "WSD"): "this version has no warmup-stable-decay schedule",
    ("lr_decay_style", "inverse-square-root"): "this version has no inverse square root schedule",
    ("advantage_estimator", "gspo"): "this version has GRPO only",
    ("advantage_estimator", "ppo"): "this version has GRPO only, and no critic",
    ("advantage_estimator", "reinforce_plus_plus"): "this version has GRPO only",
    ("advantage_estimator", "reinforce_plus_plus_baseline"): "this version has GRPO only",
}


def value_problem(origin: str, flag: Flag, value: object, place: tuple[int | str, ...]) -> str:
    """One line about a value that pydantic refused; ``place`` is where in the value, the index of a list's item."""
    seen = _show(value)
    if place and isinstance(place[0], int) and isinstance(value, tuple | list):
        seen = _show(value[place[0]])
    line = f"{origin} {seen}: must be {flag.expects}"
    reason = _VALUES.get((flag.name, str(value))) or _REASONS.get(flag.name)
    return f"{line} ({reason})" if reason else line


def raise_problems(problems: Sequence[str]) -> None:
    """Raises one InputError for all of them, one line each; nothing where there are none."""
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError(f"{len(problems)} problems with the configuration:\n" + "\n".join(f"  {p}" for p in problems))


def _show(value: object) -> str:
    match value:
        case None:
            return NONE
        case bool():
            return str(value).lower()
        case str():
            return value if value and not value.isspace() else repr(value)
        case tuple() | list():
            return "[" + ", ".join(_show(item) for item in value) + "]"
        case _:
            return str(value)
