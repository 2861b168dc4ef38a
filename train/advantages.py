"""Rewards become advantages: GRPO, each response judged against the other responses to its prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-6


def group_advantages(
    rewards: NDArray[np.float64],
    group_ids: NDArray[np.int32],
    counted: NDArray[np.bool_],
    *,
    normalize_std: bool,
) -> NDArray[np.float32]:
    """Advantage of each response within its own group, shape [n]; groups may differ in size.

    ``(r - mean) / (std + 1e-6)`` with the unbiased standard deviation (DeepSeekMath, arXiv 2402.03300, eq. 4; the paper
    leaves the estimator open, n - 1 is what public implementations use), or ``r - mean`` without ``normalize_std``
    (Dr. GRPO, arXiv 2503.20783). Computed in float64. Responses not ``counted`` do not enter mean and deviation and
    get 0. A group with one counted response, or whose rewards are all equal, says nothing about its responses: 0.
    Rewards too large for float64 to compare give a value that is not finite; the caller refuses them.
    """
    advantages = np.zeros(len(rewards))
    if not counted.any():
        return advantages.astype(np.float32)
    group = np.unique(group_ids[counted], return_inverse=True)[1]
    reward = rewards[counted]
    size = np.bincount(group)
    with np.errstate(over="ignore", invalid="ignore"):
        deviation = reward - (np.bincount(group, reward) / size)[group]
        if normalize_std:
            std = np.sqrt(np.bincount(group, deviation**2) / np.maximum(size - 1, 1))
            std[np.isinf(std)] = np.nan
            deviation = deviation / (std[group] + STD_EPS)
    # The mean of equal numbers can miss them by a rounding error, which a tiny deviation would blow up: ask the spread.
    lowest, highest = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(lowest, group, reward)
    np.maximum.at(highest, group, reward)
    advantages[counted] = np.where((highest > lowest)[group], deviation, 0.0)
    return advantages.astype(np.float32)
