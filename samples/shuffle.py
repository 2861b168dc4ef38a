"""The order in which an epoch visits the prompts."""

from __future__ import annotations

import numpy as np


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Every row number below ``rows`` once, int64: a function of seed and epoch alone, or file order.

    Shuffling sorts the raw output of a Philox generator keyed by (seed, epoch). NumPy promises that raw output for
    good, as it does not for ``Generator.permutation``, so a run can be resumed under another version.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    return np.argsort(generator.random_raw(rows), kind="stable")
