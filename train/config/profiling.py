"""Settings of ``--profile``: which steps of a run, and which half of them, leave traces."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from train.config.sections import Section

_STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class ProfilingConfig(Section):
    """Profiling"""

    profile: bool = Field(
        False, description="write traces and memory records of some steps into the run directory's profile/"
    )
    profile_steps: str | None = Field(
        None,
        description="those steps, from 0 as in metrics.jsonl: 3 or 3-5 (default: the run's second, or its only one)",
    )
    profile_what: Literal["all", "train", "rollout"] = Field("all", description="which half of a step")


def step_range(text: str) -> range | None:
    """``3`` or ``3-5``, both ends included, as a range; None for anything else and for an end before the beginning."""
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        return None
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    return range(first, last + 1) if last >= first else None
