"""Which weights wrote which tokens of a response: stretches ``[version, tokens]``, in the order of the response.

A stretch ends where an update was committed while the response was being written, or where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Spans = list[list[int]]


def joined(*parts: Iterable[Sequence[int]]) -> Spans:
    """One list of all stretches; neighbours of one version become one, and empty ones are left out."""
    spans: Spans = []
    for version, tokens in (stretch for part in parts for stretch in part):
        if tokens and spans and spans[-1][0] == version:
            spans[-1][1] += tokens
        elif tokens:
            spans.append([version, tokens])
    return spans


def fitted(spans: Iterable[Sequence[int]], length: int, version: int) -> Spans:
    """Stretches of exactly ``length`` tokens: cut at the end, or filled up there with ``version``."""
    fit: Spans = []
    left = length
    for of, tokens in spans:
        fit.append([of, min(tokens, left)])
        left -= fit[-1][1]
    return joined(fit, [[version, left]])
