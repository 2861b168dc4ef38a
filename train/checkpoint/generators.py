"""State of the process's random generators, as JSON: for rewards, filters and hooks of the user's that draw from them.

Nothing of ours does: prompts are permuted, tokens sampled and micro-batches cut by (seed, step, index) alone.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """The generators of ``random``, NumPy (the legacy global one) and torch's host."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "random": [version, _packed(np.asarray(words, np.uint32)), gauss],
        "numpy": [str(name), _packed(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)],
        "torch": _packed(torch.get_rng_state().numpy()),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Set the generators to what ``generator_states`` gave."""
    version, words, gauss = states["random"]
    random.setstate((version, tuple(_unpacked(words, np.uint32).tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, _unpacked(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_unpacked(states["torch"], np.uint8).copy()))


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _unpacked(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
