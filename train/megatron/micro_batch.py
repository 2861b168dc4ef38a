"""A training batch as tensors on the device: one padded micro-batch at a time, cut out of flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train.batch import TrainBatch
from train.batching import Indices


@dataclass
class MicroBatch:
    """B sequences without their last token, which predicts nothing, and T trained response tokens.

    tokens, positions: int64 [B, S], padded on the right, which needs no mask under causal attention; or packed into
    [1, S] one after the other, as ``bounds`` says: int32 [B + 1], where each begins and the last ends. A sample whose
    tokens begin another sample's reads its logits there: short responses to one prompt often coincide. rows: int64 [T],
    where in the flattened tokens the logits of each trained token stand; targets: int64 [T]; weights (share of the
    loss) and advantages: fp32 [T]; rollout_log_probs: fp32 [T] or None; sample_of: int64 [T], which of ``num_samples``
    samples a token is of. kept_ids, kept_tokens: as ``kept_token_log_probs`` takes them; has_kept: bool [T]; all None
    when nothing was filtered. ``old_log_probs`` and ``reference_log_probs`` (fp32 [T]) are filled in by forward passes
    before training, where they are needed.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor | None
    sample_of: Tensor
    num_samples: int
    bounds: Tensor | None = None
    kept_ids: Tensor | None = None
    kept_tokens: Tensor | None = None
    has_kept: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None


class BatchOnDevice:
    """Cuts micro-batches out of a batch. ``width_multiple``: every S is a multiple of it (sequence parallelism).
    ``packed``: sequences follow one another instead of being padded to the longest."""

    def __init__(
        self, batch: TrainBatch, device: torch.device, width_multiple: int = 1, *, packed: bool = False
    ) -> None:
        self.batch = batch
        self.device = device
        self.width_multiple = width_multiple
        self.packed = packed
        self.lengths = np.fromiter(map(len, batch.tokens), np.int64, len(batch))
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._inputs = [tokens[:-1].tobytes() for tokens in batch.tokens]
        self._tokens = np.concatenate(batch.tokens).astype(np.int64)
        self._response_lengths = batch.response_lengths.astype(np.int64)
        self._response_starts = np.cumsum(self._response_lengths) - self._response_lengths
        self._trained = np.concatenate(batch.loss_masks)
        sample_of = np.repeat(np.arange(len(batch)), self._response_lengths)
        self.trained_tokens = np.bincount(sample_of[self._trained], minlength=len(batch))
        log_probs = batch.rollout_log_probs
        self._rollout_log_probs = None if log_probs is None else np.concatenate(log_probs)

    @property
    def active(self) -> Indices:
        """The samples that have a token to train on."""
        return np.flatnonzero(self.trained_tokens)

    def highest_token_id(self) -> int:
        return int(self._tokens.max(initial=0))

    def micro_batch(self, samples: Indices, weights: NDArray[np.float32]) -> MicroBatch:
        """The micro-batch of these samples; ``weights`` [n] is each sample's weight per token in its optimizer step.

        Without samples it holds one token and trains none: a rank with nothing to do still joins the collectives.
        """
        sequences, sequence_of = self._distinct(samples)
        bounds = self._bounds(sequences) if self.packed else None
        tokens = self._padded(sequences) if bounds is None else self._joined(sequences, bounds)
        starts = np.arange(len(tokens)) * tokens.shape[1] if bounds is None else bounds[:-1]
        positions = np.arange(tokens.shape[1])
        if bounds is not None:
            positions = positions - np.repeat(starts, np.diff(bounds))
        response_lengths = self._response_lengths[samples]
        place = np.repeat(np.arange(len(samples)), response_lengths)
        position = np.arange(len(place)) - np.repeat(np.cumsum(response_lengths) - response_lengths, response_lengths)
        flat = self._response_starts[samples][place] + position
        trained = self._trained[flat]
        place, position, flat = place[trained], position[trained], flat[trained]
        sample = samples[place]
        index = self.lengths[sample] - self._response_lengths[sample] + position  # of the token in its sequence
        log_probs = self._rollout_log_probs
        return MicroBatch(
            tokens=self._to_device(tokens),
            positions=self._to_device(positions).expand(len(tokens), -1),
            bounds=None if bounds is None else self._to_device(bounds.astype(np.int32)),
            rows=self._to_device(starts[sequence_of[place]] + index - 1),
            targets=self._to_device(self._tokens[self._starts[sample] + index]),
            weights=self._to_device(weights[sample]),
            advantages=self._to_device(self.batch.advantages[sample]),
            rollout_log_probs=None if log_probs is None else self._to_device(log_probs[flat]),
            sample_of=self._to_device(place),
            num_samples=len(samples),
            **self._kept(sample, position),
        )

    def _distinct(self, samples: Indices) -> tuple[Indices, Indices]:
        """The samples whose inputs begin no other's, and for each sample which of these it reads its logits in."""
        sequences: list[int] = []
        sequence_of = np.zeros(len(samples), np.int64)
        longest: bytes | None = None
        # In reverse alphabetical order, inputs come right after those that they begin.
        for place in sorted(range(len(samples)), key=lambda i: self._inputs[samples[i]], reverse=True):
            inputs = self._inputs[samples[place]]
            if longest is None or not longest.startswith(inputs):
                sequences.append(int(samples[place]))
                longest = inputs
            sequence_of[place] = len(sequences) - 1
        return np.array(sequences, np.int64), sequence_of

    def _padded(self, sequences: Indices) -> NDArray[np.int64]:
        """Inputs of these samples, int64 [at least 1, S]."""
        width = int(self.lengths[sequences].max(initial=2)) - 1
        width = -(-width // self.width_multiple) * self.width_multiple
        column = np.arange(width)
        inside = column < self.lengths[sequences, None] - 1
        tokens = np.zeros((max(len(sequences), 1), width), np.int64)
        tokens[: len(sequences)][inside] = self._tokens[(self._starts[sequences, None] + column)[inside]]
        return tokens

    def _bounds(self, sequences: Indices) -> Indices:
        """Where each sequence's input begins in the packed row, and the row's end; what the row is longer than all of
        them, for ``width_multiple`` or because there is none, belongs to the last."""
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[sequences] - 1)])
        if len(bounds) == 1:
            bounds = np.array([0, 1])
        bounds[-1] = -(-bounds[-1] // self.width_multiple) * self.width_multiple
        return bounds

    def _joined(self, sequences: Indices, bounds: Indices) -> NDArray[np.int64]:
        """Inputs of these samples, int64 [1, S]."""
        tokens = np.zeros((1, int(bounds[-1])), np.int64)
        for start, sample in zip(bounds.tolist(), sequences.tolist(), strict=False):
            length = int(self.lengths[sample]) - 1
            first = int(self._starts[sample])
            tokens[0, start : start + length] = self._tokens[first : first + length]
        return tokens

    def _kept(self, sample: Indices, position: Indices) -> dict[str, Tensor]:
        kept = self.batch.kept_token_ids
        if kept is None:
            return {}
        ids = [kept[s][p] for s, p in zip(sample.tolist(), position.tolist(), strict=True)]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.concatenate([np.zeros(0, np.int64), *ids])
        return {
            "kept_ids": self._to_device(flat.astype(np.int64)),
            "kept_tokens": self._to_device(np.repeat(np.arange(len(ids)), counts)),
            "has_kept": self._to_device(counts > 0),
        }

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)
