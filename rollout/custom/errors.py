"""What is raised when a user's function fails or gives back what cannot be used."""

from __future__ import annotations

import traceback

from samples.errors import RunError


class CustomFunctionError(RunError):
    """A user's function raised, or broke its contract; the message names flag, function and sample or group."""


def failed(flag: str, path: str, subject: str, error: BaseException) -> CustomFunctionError:
    """The error to raise ``from error``: what ``path`` raised for ``subject``, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return CustomFunctionError(f"{flag} {path} failed on {subject}: {type(error).__name__}: {error}{place}")
