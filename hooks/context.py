"""The rollout that the current task works for, for code that is not handed the id."""

from __future__ import annotations

from contextvars import ContextVar

_rollout_id: ContextVar[int | None] = ContextVar("rollout_id", default=None)


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set the id that hooks see when neither the caller nor the sample names one.

    It holds in the current task and in tasks created from it afterwards. It reaches neither other threads, nor Ray
    actors, nor tasks that exist already: a collector passes ``rollout_id=`` and sets ``Sample.rollout_id`` instead.
    """
    _rollout_id.set(rollout_id)


def current_rollout_id() -> int | None:
    """The id set in this task, or None."""
    return _rollout_id.get()
