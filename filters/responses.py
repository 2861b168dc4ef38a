"""Filters that look at the responses of a group, not at their rewards."""

from __future__ import annotations

from typing import Any

from filters.output import DynamicFilterOutput, FilterGroup, OutputFilter, leaves
from samples import Status


def response_length_between(low: float, high: float | None = None) -> OutputFilter:
    """A filter that keeps groups whose mean response length, in tokens, is in ``low <= mean <= high``."""

    def length_filter(_args: Any, group: FilterGroup, **_kwargs: Any) -> DynamicFilterOutput:
        lengths = [sample.response_length for sample in leaves(group)]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        if mean < low:
            return DynamicFilterOutput(keep=False, reason="response_too_short")
        if high is not None and mean > high:
            return DynamicFilterOutput(keep=False, reason="response_too_long")
        return DynamicFilterOutput(keep=True)

    return length_filter


def truncated_at_most(fraction: float) -> OutputFilter:
    """A filter that keeps groups of which at most this fraction of the samples was cut off by a length limit."""

    def truncation_filter(_args: Any, group: FilterGroup, **_kwargs: Any) -> DynamicFilterOutput:
        samples = leaves(group)
        truncated = sum(sample.status is Status.TRUNCATED for sample in samples)
        keep = truncated <= fraction * len(samples)
        return DynamicFilterOutput(keep=keep, reason=None if keep else "truncated")

    return truncation_filter


def check_response_length(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups that say something: at least one token a response on average. See ``response_length_between``."""
    return _not_empty(args, group, **kwargs)


def check_truncation(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups of which at most half was cut off. See ``truncated_at_most``."""
    return _half_truncated(args, group, **kwargs)


_not_empty = response_length_between(1)
_half_truncated = truncated_at_most(0.5)
