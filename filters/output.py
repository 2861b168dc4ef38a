"""A filter's verdict on a group, and what a collector does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samples import Sample

Member = Sample | list[Sample]  # a response, or the samples into which one response fanned out
FilterGroup = Sequence[Member]
# Reasons of groups that cannot be trained on at all: no fallback keeps them.
UNUSABLE = frozenset({"no_reward", "nonfinite_reward"})


@dataclass
class DynamicFilterOutput:
    """Whether to train on a group. ``reason`` names why not, from a small fixed set: it becomes a metric's name.

    With ``keep_when_insufficient`` the group is kept all the same once dropping it would cost another sampling round.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


Filter = Callable[..., DynamicFilterOutput | bool]
OutputFilter = Callable[..., DynamicFilterOutput]


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput | bool, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group leaves.

    ``remaining_batch_size`` is the number of groups submitted for this step and not dropped, this one included;
    ``target_data_size`` the number that the step needs. A rejected group that allows it stays when dropping it would
    leave fewer than that.
    """
    verdict = _verdict(output, "the filter")
    if verdict.keep:
        return False
    return not (verdict.keep_when_insufficient and remaining_batch_size <= target_data_size)


def call_dynamic_filter(function: Filter | None, args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
    """``function(args, group, **kwargs)`` as a DynamicFilterOutput; no function keeps every group.

    A bare truth value (NumPy's and torch's too) is accepted; anything else is a TypeError naming the filter. An error
    of the filter's own is raised as it is, with a note that names filter and group.
    """
    if function is None:
        return DynamicFilterOutput(keep=True)
    try:
        output = function(args, group, **kwargs)
    except Exception as error:
        error.add_note(f"in the dynamic sampling filter {_name(function)}, on group {_group_index(group)}")
        raise
    return _verdict(output, _name(function))


def with_fallback(function: Filter) -> OutputFilter:
    """``function``, except that what it rejects may be kept rather than start another sampling round."""

    def filter_with_fallback(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
        output = call_dynamic_filter(function, args, group, **kwargs)
        return replace(output, keep_when_insufficient=not output.keep and output.reason not in UNUSABLE)

    filter_with_fallback.__qualname__ = f"with_fallback({_name(function)})"
    return filter_with_fallback


def all_of(*functions: Filter) -> OutputFilter:
    """Keeps what every one of ``functions`` keeps; the first that rejects gives the verdict."""

    def filter_all(args: Any, group: FilterGroup, **kwargs: Any) -> DynamicFilterOutput:
        for function in functions:
            output = call_dynamic_filter(function, args, group, **kwargs)
            if not output.keep:
                return output
        return DynamicFilterOutput(keep=True)

    return filter_all


def leaves(group: FilterGroup) -> list[Sample]:
    """Every sample of a group, fanned-out members included."""
    return [sample for member in group for sample in (member if isinstance(member, list) else [member])]


def _verdict(output: Any, name: str) -> DynamicFilterOutput:
    if isinstance(output, DynamicFilterOutput):
        reason = None if output.reason is None else str(output.reason)
        return replace(output, keep=bool(output.keep), reason=reason)  # a torch comparison gives a tensor
    if isinstance(output, bool) or str(getattr(output, "dtype", "")).endswith("bool"):  # NumPy's or torch's
        return DynamicFilterOutput(keep=bool(output))
    raise TypeError(f"{name} returned {output!r}; a filter returns a DynamicFilterOutput or a bool")


def _name(function: Any) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _group_index(group: FilterGroup) -> int | None:
    samples = leaves(group)
    return samples[0].group_index if samples else None
