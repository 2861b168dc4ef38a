"""Names of reasons that are safe to make metrics of."""

from __future__ import annotations

import re

_LIMIT = 32
_LONGEST = 64


class ReasonNames:
    """Turns a filter's reasons into at most ``limit`` metric names for a whole run; all further ones are "other".

    A filter that puts a number into its reason would otherwise add a metric a step.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def name(self, reason: str | None) -> str:
        if reason is None:
            return "unnamed"
        name = re.sub(r"[^\w.+-]+", "_", reason)[:_LONGEST] or "unnamed"
        if name not in self._known:
            if len(self._known) >= self._limit:
                return "other"
            self._known.add(name)
        return name
