"""What the scheduler needs from a model: rows join with a prompt, step together, and leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from rollout.engines.torch_engine.weights import WeightTable


class Decoder(ABC):
    """A model with a cache of ``count`` rows, one per running request, in the order in which they joined.

    Called from the decoding thread only, under ``torch.inference_mode``.
    """

    vocab_size: int
    cache_tokens: int  # what the cache can hold in all
    count: int = 0

    @abstractmethod
    def fits(self, rows: int, length: int) -> bool:
        """Whether the cache can hold ``rows`` requests of up to ``length`` tokens each."""

    @abstractmethod
    def admit(self, prompts: Sequence[Sequence[int]], source: np.ndarray, longest: int) -> torch.Tensor:
        """Add ``len(source)`` rows; row ``i`` continues ``prompts[source[i]]``. Returns logits [rows added, vocab].

        A prompt that several rows share is computed once. ``longest`` bounds the final length of every row, old ones
        included.
        """

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token (int64 [count]) to every row. Returns logits [count, vocab]."""

    @abstractmethod
    def retire(self, rows: np.ndarray) -> None:
        """These rows are finished: they are stepped on, for nothing, until ``move`` fills or drops them."""

    @abstractmethod
    def move(self, sources: np.ndarray, targets: np.ndarray, count: int) -> None:
        """Put rows ``sources`` in place of ``targets``, then drop all from ``count`` on."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all rows and everything cached."""

    @property
    @abstractmethod
    def weights(self) -> WeightTable:
        """The tensors to fill. Taken anew after ``allocate_weights``."""

    @abstractmethod
    def allocate_weights(self) -> None: ...

    @abstractmethod
    def release_weights(self) -> None: ...

    @abstractmethod
    def allocate_cache(self) -> None: ...

    @abstractmethod
    def release_cache(self) -> None: ...

    def release_step(self) -> None:  # noqa: B027 - most prepare nothing
        """Drop what was prepared for the next steps; it is made again by the first one."""
