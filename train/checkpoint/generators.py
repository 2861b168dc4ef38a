"""Seeds and states (as JSON) of the process's random generators: for rewards, filters and hooks of the user's.

Nothing of ours does: prompts are permuted, tokens sampled and micro-batches cut by (seed, step, index) alone.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from accel.contract import Accelerator
from samples.errors import InputError


def seed_generators(seed: int, accelerator: Accelerator | None) -> None:
    """Begin all of them at ``seed``: those of ``random``, NumPy (the legacy global one), torch's host and device.

    Here and below None stands for a process without a device.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if accelerator is not None and accelerator.capabilities.own_generator:
        accelerator.manual_seed(seed)


def generator_states(accelerator: Accelerator | None) -> dict[str, Any]:
    """Where they stand."""
    states = _host_states()
    if accelerator is not None and accelerator.capabilities.own_generator:
        states["device"] = [accelerator.name, _packed(accelerator.rng_state().numpy())]
    return states


def _host_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "random": [version, _packed(np.asarray(words, np.uint32)), gauss],
        "numpy": [str(name), _packed(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)],
        "torch": _packed(torch.get_rng_state().numpy()),
    }


def restore_generators(states: dict[str, Any], accelerator: Accelerator | None) -> None:
    """Set the generators to what ``generator_states`` gave; the device's if it is one of the same accelerator."""
    _restore_host(states)
    owner, state = states.get("device", (None, None))
    if accelerator is not None and owner == accelerator.name and accelerator.capabilities.own_generator:
        accelerator.set_rng_state(torch.from_numpy(_unpacked(state, np.uint8).copy()))


def _restore_host(states: dict[str, Any]) -> None:
    version, words, gauss = states["random"]
    random.setstate((version, tuple(_unpacked(words, np.uint32).tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, _unpacked(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_unpacked(states["torch"], np.uint8).copy()))


def check_generators(states: dict[str, Any], source: str) -> None:
    """Raise InputError, naming ``source``, unless the host's generators can be restored from ``states``.

    Changes nothing, and leaves the device alone, which only a worker may open.
    """
    before = _host_states()
    try:
        _restore_host(states)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{source}: the saved random generators cannot be taken up ({error}); use another") from error
    finally:
        _restore_host(before)


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _unpacked(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
