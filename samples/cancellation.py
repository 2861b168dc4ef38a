"""Whose a cancellation is: the run's own, or an error of a function of the user's."""

from __future__ import annotations

import asyncio


def is_cancelled(error: BaseException) -> bool:
    """Whether ``error`` is the current task's own cancellation, which has to go on. One that a user's function raised,
    such as by awaiting a task that it had cancelled, is an error of the function's: nobody who waits would hear of it.
    """
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0
