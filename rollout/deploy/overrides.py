"""Arguments of SGLang's servers that a person gives beside those that follow from the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollout.deploy.config import SGLangConfig
from samples.errors import InputError

_OURS = frozenset(
    {
        *("model_path", "host", "port", "tp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "device"),
        *("disaggregation_mode", "disaggregation_bootstrap_port"),
        *("encoder_only", "language_only", "encoder_urls", "encoder_bootstrap_port"),
        *("model", "tensor_parallel_size"),  # SGLang's other names for some of these
        *("pp_size", "pipeline_parallel_size"),  # engines take the devices that the layout gives them
        *("config", "grpc_mode", "smg_grpc_mode", "ssl_keyfile", "ssl_certfile"),  # a file of arguments; plain HTTP
    }
)
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.IGNORECASE)


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
    for name, value in sorted(named.items(), key=lambda one: one[0]):
        if not _NAME.fullmatch(name):
            raise InputError(f"{where}: {name!r} is no argument's name; give one as SGLang has it")
        # SGLang takes the beginning of a name for the name.
        whole = next((ours for ours in sorted(_OURS) if ours.startswith(name)), None)
        if whole is not None or name.endswith("_init_addr"):  # dist_init_addr has another name, a vendor's
            raise InputError(f"{where}: {name} follows from the layout and the run's flags; leave it out")
        if any(str(one).startswith("--") for one in (value if isinstance(value, list | tuple) else [value])):
            raise InputError(f"{where}: {name}: a value that begins with -- would be an argument of its own")
    return named
