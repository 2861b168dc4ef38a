"""Filters that look at the rewards of a group.

``args.reward_key`` (``--reward-key``) picks the number out of a mapping reward. A member that fanned out into several
samples counts by every reward in it for spread, and by their mean for means.
"""

from __future__ import annotations

import math
from typing import Any

from filters.output import DynamicFilterOutput, FilterGroup, OutputFilter, with_fallback
from samples import Sample, Status

_LEAST_SPREAD = 1e-6  # standard deviations up to this are rounding errors


def check_reward_nonzero_std(args: Any, group: FilterGroup, **_kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ: where they do not, every group-normalised advantage is zero.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). A group of one has no spread and is rejected.
    """
    rewards = _member_rewards(args, group)
    flaw = _flaw(rewards)
    if flaw is not None:
        return DynamicFilterOutput(keep=False, reason=flaw)
    flat = [reward for member in rewards for reward in member]
    if len(flat) == 1:
        return DynamicFilterOutput(keep=False, reason="group_of_one")
    if _standard_deviation(flat) > _LEAST_SPREAD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=_ZERO_STD.get(flat[0], "zero_std_other"))


def check_reward_nonzero_std_with_fallback(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """As ``check_reward_nonzero_std``, but keeps groups without spread rather than start another sampling round."""
    return _nonzero_std_with_fallback(args, group, **kwargs)


def reward_mean_between(low: float, high: float) -> OutputFilter:
    """A filter that keeps groups whose rewards differ and whose mean reward is in ``low <= mean <= high``."""

    def mean_filter(args: Any, group: FilterGroup, **_kwargs: Any) -> DynamicFilterOutput:
        # A mean says nothing about spread: all rewards 0.5 lie in the middle and teach nothing.
        output = check_reward_nonzero_std(args, group)
        if not output.keep:
            return output
        mean = _mean([_mean(member) for member in _member_rewards(args, group) if member])
        return _in_band(mean, low, high, "reward_mean")

    return mean_filter


def correctness_between(low: float, high: float, *, correct_at: float = 1.0) -> OutputFilter:
    """A filter that keeps groups of which a fraction in ``low <= fraction <= high`` is correct.

    A response is correct whose (mean) reward is ``correct_at`` or more; one without a reward is not.
    """

    def correctness_filter(args: Any, group: FilterGroup, **_kwargs: Any) -> DynamicFilterOutput:
        rewards = _member_rewards(args, group)
        flaw = _flaw(rewards)
        if flaw is not None:
            return DynamicFilterOutput(keep=False, reason=flaw)
        correct = sum(1 for member in rewards if member and _mean(member) >= correct_at)
        return _in_band(correct / len(rewards), low, high, "correctness")

    return correctness_filter


def check_reward_mean_range(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ and whose mean is between 0.1 and 0.9; see ``reward_mean_between``."""
    return _mean_range(args, group, **kwargs)


def check_correctness_band(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups of which 20 to 80 % have a reward of 1 or more; see ``correctness_between``."""
    return _correctness_band(args, group, **kwargs)


# The two groups without spread that tell something: all wrong and all right.
_ZERO_STD = {0.0: "zero_std_0.0", 1.0: "zero_std_1.0"}
_nonzero_std_with_fallback = with_fallback(check_reward_nonzero_std)
_mean_range = reward_mean_between(0.1, 0.9)
_correctness_band = correctness_between(0.2, 0.8)


def _member_rewards(args: Any, group: FilterGroup) -> list[list[float]]:
    """The rewards of each member's samples that count: failed and aborted ones are no responses to compare with."""
    key = getattr(args, "reward_key", None)  # args may be a user's own namespace
    members = [member if isinstance(member, list) else [member] for member in group]
    return [[sample.reward_value(key) for sample in member if _counts(sample)] for member in members]


def _counts(sample: Sample) -> bool:
    return sample.reward is not None and sample.status not in (Status.FAILED, Status.ABORTED)


def _flaw(rewards: list[list[float]]) -> str | None:
    flat = [reward for member in rewards for reward in member]
    if not flat:
        return "no_reward"
    return None if all(map(math.isfinite, flat)) else "nonfinite_reward"


def _standard_deviation(values: list[float]) -> float:
    """Of a sample, float64. Taken around the first value, so that equal values give exactly zero at any size."""
    offsets = [value - values[0] for value in values]
    mean = math.fsum(offsets) / len(offsets)
    return math.hypot(*(offset - mean for offset in offsets)) / math.sqrt(len(offsets) - 1)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _in_band(value: float, low: float, high: float, name: str) -> DynamicFilterOutput:
    if value < low:
        return DynamicFilterOutput(keep=False, reason=f"{name}_low")
    if value > high:
        return DynamicFilterOutput(keep=False, reason=f"{name}_high")
    return DynamicFilterOutput(keep=True)
