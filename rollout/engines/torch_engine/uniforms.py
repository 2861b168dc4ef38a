"""Random numbers that depend on seed, rollout id, sample index and token position, and on nothing else.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): output ``i`` of a
stream is ``mix(state + (i + 1) * GAMMA)``, so any position of any stream can be computed on its own, in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser, elementwise modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def stream_output(states: UInt64Array, positions: UInt64Array) -> UInt64Array:
    """Output number ``positions`` (from 0) of the SplitMix64 streams seeded with ``states``, elementwise."""
    return mix(states + (positions + np.uint64(1)) * np.uint64(_GAMMA))


def stream_key(seed: int, rollout_id: int, sample_index: int) -> int:
    """State of one sample's stream: the three numbers, modulo 2**64, each hashed into what came before."""
    key = 0
    for number in (seed, rollout_id, sample_index):  # Python's integers: NumPy's cost ten times as much one at a time
        key = (key + number + _GAMMA) & _MASK
        key = ((key ^ (key >> 30)) * _MIX_1) & _MASK
        key = ((key ^ (key >> 27)) * _MIX_2) & _MASK
        key ^= key >> 31
    return key


def uniforms(keys: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (key, position), float64.

    52 bits are used, not 53: ``u * total`` then stays below ``total`` for every float64 ``total`` after rounding, so
    that an inverse CDF always finds a token of positive probability.
    """
    return (stream_output(keys, positions) >> np.uint64(12)).astype(np.float64) * 2.0**-52
