"""Which engine answers requests, decided without loading any."""

from __future__ import annotations

import importlib.util
from typing import Literal

from rollout.config import RolloutConfig


def choose_engine(config: RolloutConfig) -> tuple[Literal["torch", "sglang"], str]:
    """The engine's name and why it was chosen."""
    if config.rollout_engine != "auto":
        return config.rollout_engine, "asked for by --rollout-engine"
    if importlib.util.find_spec("sglang") is not None:
        return "sglang", "SGLang is installed"
    return "torch", "no SGLang is installed"
