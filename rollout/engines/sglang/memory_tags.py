"""Memory tags as SGLang's servers call them."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engines.protocol import MEMORY_TAGS
from samples.errors import InputError

SERVER_TAGS = {"weights": "weights", "kv_cache": "kv_cache", "graphs": "cuda_graph"}


def server_tags(tags: Sequence[str]) -> list[str]:
    """The servers' words; none given: all. Raises InputError for one that is unknown."""
    unknown = [tag for tag in tags if tag not in SERVER_TAGS]
    if unknown:
        raise InputError(f"memory tag {unknown[0]!r} is unknown: use {', '.join(MEMORY_TAGS)}, or none for all")
    return [SERVER_TAGS[tag] for tag in tags or MEMORY_TAGS]
