"""The plain, validated batch that a collector's groups become before any trainer sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainBatch:
    """One rollout's samples as columns; entry i of every list belongs to sample i. Arrays, so Ray shares them without copies.

    tokens: int32 [prompt + response] each; response_lengths: int32 [n]; loss_masks: bool [response] each;
    rewards: float64 [n]; advantages: float32 [n] (constant over a response); rollout_log_probs: float32 [response] each,
    or None; kept_token_ids: per response token an int32 array of the ids top-p/top-k left, or None; group_ids: int32 [n].
    """

    tokens: list[NDArray[np.int32]]
    response_lengths: NDArray[np.int32]
    loss_masks: list[NDArray[np.bool_]]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float32]
    group_ids: NDArray[np.int32]
    sample_indices: NDArray[np.int64]
    weight_versions: NDArray[np.int32]
    temperature: float
    rollout_log_probs: list[NDArray[np.float32]] | None = None
    kept_token_ids: list[list[NDArray[np.int32]]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)
