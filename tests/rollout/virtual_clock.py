"""An event loop whose time passes only when nothing is left to do: an hour of sleeping takes no time at all."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits and nothing is due: in real time this would hang."""


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock
        self.now += max(0.0, timeout)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual seconds from 0. No input or output, and nothing from other threads."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on a loop of its own and close it. A task that is left behind at the end is an error."""
    loop = VirtualClockLoop()
    try:
        result = loop.run_until_complete(coroutine)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left behind: {left}"
        return result
    finally:
        loop.close()
