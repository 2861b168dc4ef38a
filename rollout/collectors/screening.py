"""The dynamic-sampling filter as a collector asks it, and what is kept although the filter rejected it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from filters import DynamicFilterOutput, call_dynamic_filter
from observability.rollout_metrics import leaves_of
from samples.errors import InputError, raised_at
from samples.sample import Group

FALLBACK_MARK = "kept_by_fallback"


class Screen:
    """Judges groups; ``path`` is that of ``--dynamic-sampling-filter-path``, for messages."""

    def __init__(self, dynamic_filter: Callable[..., Any] | None, args: Any, path: str | None) -> None:
        self._filter = dynamic_filter
        self._args = args
        self.path = path

    def judge(self, group: Group, index: int | None) -> DynamicFilterOutput:
        """The verdict. Raises InputError, naming filter and group, for a filter that fails.

        The filter sees responses that fanned out as lists; afterwards ``group`` is flat, as all that follows takes it.
        """
        if not group:
            return DynamicFilterOutput(keep=False, reason="emptied_by_hook")
        if self._filter is None:
            group[:] = leaves_of(group)
            return DynamicFilterOutput(keep=True)
        try:
            verdict = call_dynamic_filter(self._filter, self._args, list(group))
        except (Exception, SystemExit) as error:
            raise InputError(
                f"--dynamic-sampling-filter-path {self.path} failed on group {index}: {type(error).__name__}: "
                f"{error}{raised_at(error)}"
            ) from error
        group[:] = leaves_of(group)
        return verdict


def mark_fallback(group: Group) -> None:
    for sample in leaves_of(group):
        sample.metadata[FALLBACK_MARK] = True
