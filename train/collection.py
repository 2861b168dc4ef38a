"""Python's garbage collector around start-up, which makes a few hundred thousand objects that all stay.

Collecting while modules and models are made costs a fifth of start-up's CPU time. Afterwards a full collection would
walk all of it, two tenths of a second with torch and Megatron loaded, and a rollout's samples set one off every few
steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collections until ``spare_from_collection``, or until the block ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_from_collection() -> None:
    """Collect once, keep what is there now out of later collections, and let those begin."""
    gc.collect()
    gc.freeze()
    gc.enable()


def end_sparing() -> None:
    """Let everything be collected again, so that what a closed run held does not stay."""
    gc.unfreeze()
