"""``--custom-reward-post-process-path`` and ``--custom-convert-samples-to-train-data-path``: what they may give back.

Both run once a rollout, on the flat list of its samples, after hooks, rewards and the filter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollout.config import RewardConfig, RolloutConfig
from rollout.custom.contracts import CONVERT, REWARD_POST_PROCESS
from rollout.custom.errors import CustomFunctionError, failed
from rollout.rewards.values import as_number
from samples.sample import Sample, Status
from samples.signatures import UserFunction, load_user_function

# The columns of a conversion, under slime's names: required ones, then those that may be left out.
REQUIRED_COLUMNS = ("tokens", "response_lengths", "rewards")
OPTIONAL_COLUMNS = ("loss_masks", "rollout_log_probs", "rollout_kept_token_ids", "group_ids", "advantages")


def load_post_process(config: RewardConfig) -> UserFunction | None:
    """The function of ``--custom-reward-post-process-path``, if one is given; InputError for one that does not fit."""
    path = config.custom_reward_post_process_path
    return None if path is None else load_user_function(path, REWARD_POST_PROCESS, config.user_code_dir)


def load_conversion(rollout: RolloutConfig, reward: RewardConfig) -> UserFunction | None:
    """The same for ``--custom-convert-samples-to-train-data-path``."""
    path = rollout.custom_convert_samples_to_train_data_path
    return None if path is None else load_user_function(path, CONVERT, reward.user_code_dir)


def post_processed(function: UserFunction, args: Any, samples: Sequence[Sample]) -> list[float]:
    """What the user's function makes of the samples' rewards, a finite number each: their advantages.

    It returns a list, or a pair ``(raw_rewards, rewards)`` as slime's does, of which the second counts.
    """
    told = f"{REWARD_POST_PROCESS.flag} {function.path}"
    try:
        returned = function.call(args, list(samples))
    except (Exception, SystemExit) as error:
        raise failed(REWARD_POST_PROCESS.flag, function.path, f"{len(samples)} samples", error) from error
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = returned[1]
    values = _column(returned, told, "rewards", len(samples))
    return [
        _finite(value, f"{told} returned for sample {sample.index}")
        for value, sample in zip(values, samples, strict=True)
    ]


def converted(
    function: UserFunction, args: Any, samples: Sequence[Sample], group_ids: Sequence[int]
) -> tuple[list[list[Sample]], list[float] | None]:
    """The groups to train on, as samples with the columns that the user's function returned; and their advantages.

    A mapping of columns, one entry a training sample. ``tokens``, ``response_lengths`` and ``rewards`` are required;
    ``loss_masks`` (default: the whole response), ``rollout_log_probs``, ``rollout_kept_token_ids``, ``group_ids``
    (equal ones are normalised together; default: those of the samples, which needs one entry a sample) and
    ``advantages`` (default: by ``--advantage-estimator``) are not. Where there is one entry a sample, failed and
    removed samples stay out of training. Raises CustomFunctionError for a mapping that is none of that.
    """
    told = f"{CONVERT.flag} {function.path}"
    try:
        columns = function.call(args, list(samples))
    except (Exception, SystemExit) as error:
        raise failed(CONVERT.flag, function.path, f"{len(samples)} samples", error) from error
    rows = _checked_columns(columns, told)
    count = len(rows["tokens"])
    given_groups = rows.get("group_ids")
    if given_groups is None and count != len(samples):
        raise CustomFunctionError(
            f"{told} returned {count} entries for {len(samples)} samples: give 'group_ids' too, which say what is "
            "normalised together"
        )
    ids = [int(value) for value in (group_ids if given_groups is None else given_groups)]
    groups: dict[int, list[tuple[int, Sample]]] = {}
    for row in range(count):
        origin = samples[row] if count == len(samples) else None
        groups.setdefault(ids[row], []).append((row, _sample_of(rows, row, ids[row], origin, told)))
    ordered = [groups[group] for group in sorted(groups)]
    advantages = rows.get("advantages")
    flat = None
    if advantages is not None:
        flat = [_finite(advantages[row], f"{told} returned an advantage") for group in ordered for row, _ in group]
    return [[sample for _, sample in group] for group in ordered], flat


def _checked_columns(columns: Any, told: str) -> dict[str, list[Any]]:
    if not isinstance(columns, Mapping):
        raise CustomFunctionError(f"{told} returned {type(columns).__name__}: expected a mapping of columns")
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise CustomFunctionError(f"{told} returned no {', '.join(map(repr, missing))}; it has {sorted(columns)}")
    known = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise CustomFunctionError(
            f"{told} returned the columns {unknown}, which nothing reads; the columns are {sorted(known)}"
        )
    count = len(_column(columns["tokens"], told, "tokens", None))
    return {name: _column(values, told, name, count) for name, values in columns.items()}


def _sample_of(rows: dict[str, list[Any]], row: int, group: int, origin: Sample | None, told: str) -> Sample:
    def entry(name: str) -> Any:
        return _plain(rows[name][row]) if name in rows and rows[name][row] is not None else None

    status = Status.COMPLETED if origin is None else origin.status
    return Sample(
        tokens=entry("tokens"),
        response_length=int(entry("response_lengths")),
        reward=_finite(rows["rewards"][row], f"{told} returned a reward"),
        loss_mask=entry("loss_masks"),
        rollout_log_probs=entry("rollout_log_probs"),
        rollout_kept_token_ids=entry("rollout_kept_token_ids"),
        status=status,
        index=row if origin is None else origin.index,
        group_index=group if origin is None else origin.group_index,
        weight_version=None if origin is None else origin.weight_version,
        remove_sample=origin is not None and origin.remove_sample,
    )


def _column(values: Any, told: str, name: str, count: int | None) -> list[Any]:
    values = _plain(values)
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise CustomFunctionError(f"{told}: {name} is a {type(values).__name__}, expected a list")
    column = list(values)
    if count is not None and len(column) != count:
        raise CustomFunctionError(f"{told}: {name} has {len(column)} entries, expected {count}")
    return column


def _plain(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values


def _finite(value: Any, told: str) -> float:
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise CustomFunctionError(f"{told} {value!r}: expected a finite number")
    return number
