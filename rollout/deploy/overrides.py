"""Arguments of SGLang's servers that a person gives beside those that follow from the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.deploy.config import SGLangConfig
from samples.errors import InputError

_OURS = frozenset(
    {
        *("model_path", "host", "port", "tp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "device"),
        *("disaggregation_mode", "disaggregation_bootstrap_port"),
        *("encoder_only", "language_only", "encoder_urls", "encoder_bootstrap_port"),
    }
)


def run_overrides(config: SGLangConfig) -> dict[str, Any]:
    """``--sglang-overrides`` as a mapping. InputError for one that is not name=value, or whose value is the run's."""
    found: dict[str, Any] = {}
    for text in config.sglang_overrides:
        name, separator, value = text.partition("=")
        name = name.strip().removeprefix("--")
        if not separator or not name:
            raise InputError(f"--sglang-overrides {text}: expected name=value, such as mem_fraction_static=0.8")
        found[name] = {"true": True, "false": False}.get(value.strip().lower(), value.strip())
    return checked_overrides(found, "--sglang-overrides")


def checked_overrides(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``given`` with underscores in names. InputError, naming ``where``, for what the layout or the run decides."""
    named = {name.replace("-", "_"): value for name, value in given.items()}
    for name in sorted(set(named) & _OURS):
        raise InputError(f"{where}: {name} follows from the layout and the run's flags; leave it out")
    return named
