"""The running batch's bookkeeping: one row per request, as arrays, so that a step costs no Python per request."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from rollout.engines.torch_engine.detokenize import Detokenizer, StopStringWatch
from rollout.engines.torch_engine.sequence import Sequence


class StopIds:
    """Which tokens end a response: one line of a bool table per distinct set of ids."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lines: dict[frozenset[int], int] = {}
        self.table = np.zeros((0, vocab_size), dtype=np.bool_)

    def line(self, ids: frozenset[int]) -> int:
        if ids not in self._lines:
            entry = np.zeros((1, self._vocab_size), dtype=np.bool_)
            entry[0, [token for token in ids if 0 <= token < self._vocab_size]] = True
            self._lines[ids] = len(self.table)
            self.table = np.concatenate((self.table, entry))
        return self._lines[ids]

    def clear(self) -> None:
        self._lines.clear()
        self.table = self.table[:0]


class Rows:
    """Row ``i`` belongs to ``sequences[i]``; None there means that it is finished and its row not yet filled.

    Arrays have ``capacity`` rows; ``ids`` and ``log_probs`` [capacity, width] hold the new tokens of a row.
    """

    def __init__(self, capacity: int, vocab_size: int, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.stop_ids = StopIds(vocab_size)
        self.sequences: list[Sequence | None] = []
        self.watches: dict[int, StopStringWatch] = {}  # by row
        self.generated = np.zeros(capacity, dtype=np.int64)
        self.limit = np.zeros(capacity, dtype=np.int64)
        self.minimum = np.zeros(capacity, dtype=np.int64)
        self.first_position = np.zeros(capacity, dtype=np.int64)
        self.keys = np.zeros(capacity, dtype=np.uint64)
        self.stop_line = np.zeros(capacity, dtype=np.int64)
        self.alive = np.zeros(capacity, dtype=np.bool_)
        self.old_cache = np.zeros(capacity, dtype=np.bool_)  # keys and values of weights before the present ones
        self.ids = np.zeros((capacity, 0), dtype=np.int64)
        self.log_probs = np.zeros((capacity, 0), dtype=np.float32)
        self.running = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, newcomers: SequenceOf[Sequence]) -> None:
        first = len(self.sequences)
        rows = slice(first, first + len(newcomers))
        self._widen(max(seq.limit for seq in newcomers))
        if first == 0 and len(self.stop_ids.table) > 8:
            self.stop_ids.clear()
        self.generated[rows] = [len(seq.output_ids) for seq in newcomers]
        self.limit[rows] = [seq.limit for seq in newcomers]
        self.minimum[rows] = [seq.request.sampling.min_new_tokens for seq in newcomers]
        self.first_position[rows] = [seq.request.first_position for seq in newcomers]
        self.keys[rows] = [seq.key for seq in newcomers]
        self.stop_line[rows] = [self.stop_ids.line(seq.stop_ids) for seq in newcomers]
        self.alive[rows] = True
        self.old_cache[rows] = False
        self.running += len(newcomers)
        self.sequences.extend(newcomers)
        for row, seq in enumerate(newcomers, first):
            if seq.output_ids:  # it was interrupted
                self.ids[row, : len(seq.output_ids)] = seq.output_ids
                self.log_probs[row, : len(seq.output_ids)] = seq.log_probs
            if seq.request.sampling.stop:
                watch = StopStringWatch(self._detokenizer, seq.request.sampling.stop)
                for token in seq.output_ids:
                    watch.found(token)
                self.watches[row] = watch

    def remove(self, row: int) -> Sequence:
        """Take a request out, its tokens filled in; the row stays until ``close_gaps``."""
        seq = self.sequences[row]
        assert seq is not None
        count = int(self.generated[row])
        seq.output_ids = self.ids[row, :count].tolist()
        seq.log_probs = self.log_probs[row, :count].tolist()
        self.sequences[row] = None
        self.alive[row] = False
        self.generated[row] = 0
        self.watches.pop(row, None)
        self.running -= 1
        return seq

    def close_gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Fill finished rows with the last living ones: (from, to), after which ``running`` rows are left."""
        alive = self.alive[: len(self.sequences)]
        targets = np.flatnonzero(~alive[: self.running])
        sources = self.running + np.flatnonzero(alive[self.running :])
        for array in (
            self.generated,
            self.limit,
            self.minimum,
            self.first_position,
            self.keys,
            self.stop_line,
            self.alive,
            self.old_cache,
        ):
            array[targets] = array[sources]
        self.ids[targets] = self.ids[sources]
        self.log_probs[targets] = self.log_probs[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.sequences[target] = self.sequences[source]
            if source in self.watches:
                self.watches[target] = self.watches.pop(source)
        self.alive[self.running : len(self.sequences)] = False
        del self.sequences[self.running :]
        return sources, targets

    def _widen(self, width: int) -> None:
        missing = width - self.ids.shape[1]
        if missing > 0:
            grow = ((0, 0), (0, max(missing, self.ids.shape[1])))
            self.ids = np.pad(self.ids, grow)
            self.log_probs = np.pad(self.log_probs, grow)
