"""What one rollout's training adds up to, and its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from train.megatron.objective import SUMS
from train.megatron.parallel import RankPlacement, max_over_ranks, sum_over_ranks


@dataclass
class Tally:
    """Sums stay on the device until ``metrics``; counts are of the whole batch, which every rank knows.

    ``measured_tokens`` are those whose rollout log-probabilities were compared: scored by the weights that made them.
    """

    device: torch.device
    samples: int
    tokens: int
    measured_tokens: int = 0
    corrected: bool = False  # with --use-tis
    grad_norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums = torch.zeros(len(SUMS) + 1, device=self.device)  # the last one: rollout difference
        self._largest_difference = torch.zeros((), device=self.device)

    def add_sums(self, sums: Iterable[Tensor]) -> None:
        for values in sums:
            self._sums[:-1] += values

    def add_differences(self, differences: Iterable[Tensor]) -> None:
        """Of ``rollout_difference``: sum and maximum."""
        for values in differences:
            self._sums[-1] += values[0]
            self._largest_difference = torch.maximum(self._largest_difference, values[1])

    def metrics(self, learning_rate: float, placement: RankPlacement) -> dict[str, float]:
        """Means over optimizer steps (loss and its parts, gradient norm) and over tokens (the rest). Collective."""
        totals = sum_over_ranks(self._sums, placement).tolist()
        sums = dict(zip(SUMS, totals, strict=False))
        steps, tokens = max(len(self.grad_norms), 1), max(self.tokens, 1)
        metrics = {
            "train/loss": sums["loss"] / steps,
            "train/pg_loss": sums["pg_loss"] / steps,
            "train/entropy": sums["entropy"] / steps,
            "train/kl": sums["kl"] / steps,
            "train/grad_norm": sum(self.grad_norms) / steps,
            "train/lr": learning_rate,
            "train/clip_fraction": sums["clipped"] / tokens,
            "train/ratio_mean": sums["ratio"] / tokens,
            "train/tokens": float(self.tokens),
            "train/num_samples": float(self.samples),
            "train/optimizer_steps": float(len(self.grad_norms)),
        }
        if self.corrected:
            metrics |= {
                "train/tis_ratio_mean": sums["tis_ratio"] / tokens,
                "train/tis_weight_mean": sums["tis_weight"] / tokens,
                "train/tis_clip_fraction": sums["tis_clipped"] / tokens,
            }
        if self.measured_tokens:
            largest = max_over_ranks(self._largest_difference, placement)
            metrics["train/train_rollout_logprob_abs_diff"] = totals[-1] / self.measured_tokens
            metrics["train/train_rollout_logprob_abs_diff_max"] = float(largest)
        return metrics
