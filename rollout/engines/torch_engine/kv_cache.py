"""Keys and values of the running requests: one block of memory per layer, cut into rows of equal length."""

from __future__ import annotations

import numpy as np
import torch

ROW_MULTIPLE = 16  # row lengths are rounded up to this: see dense.py on why results do not depend on batch mates

_FREE_SHARE = 0.5  # the rest is for activations, and for others on the same device


def round_up(length: int) -> int:
    return -(-length // ROW_MULTIPLE) * ROW_MULTIPLE


class KVCache:
    """One row per running request; token ``i`` of a request lies at column ``i`` of its row.

    A layer is [2 (keys, values), rows, kv heads, columns, head dim]. (Keys and values of a token do not lie side by
    side: matrix products over every other line of memory take three times as long.) With ``max_total_tokens`` the
    memory is taken once and never exceeded; without, it grows with what the running requests need, up to
    ``_FREE_SHARE`` of ``free_memory`` (bytes; None: unknown). Rows are cut anew (contents kept) when a request needs
    longer ones.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_len: int,
        max_total_tokens: int | None,
        free_memory: int | None,
    ) -> None:
        self._kv_heads, self._head_dim, self._layers = kv_heads, head_dim, layers
        self._dtype, self._device = dtype, device
        self._preallocate = max_total_tokens is not None
        if max_total_tokens is not None:
            self.max_tokens = max_total_tokens
        else:
            self.max_tokens = max_rows * round_up(max_len)
            if free_memory is not None:
                bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize
                self.max_tokens = min(self.max_tokens, int(_FREE_SHARE * free_memory) // bytes_per_token)
        self._blocks: list[torch.Tensor] = []
        self.layers: list[torch.Tensor] = []
        self.columns = 0
        self.generation = 0  # counts cuts: views of ``layers`` are good while it stays the same
        self.allocate()

    @property
    def allocated(self) -> bool:
        return bool(self._blocks)

    def allocate(self) -> None:
        self._take(self.max_tokens if self._preallocate else 0)

    def release(self) -> None:
        self._blocks, self.layers, self.columns = [], [], 0
        self.generation += 1

    def clear(self) -> None:
        """Forget all rows. Zeroes, because what a row does not use is masked by adding -inf, which NaN survives."""
        for block in self._blocks:
            block.zero_()
        self.columns = 0

    def fits(self, rows: int, length: int) -> bool:
        return rows * round_up(length) <= self.max_tokens

    def reserve(self, rows: int, length: int, used: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens, keeping what the first ``used`` rows hold."""
        columns = max(round_up(length), self.columns if used else 0)
        if rows * columns > self.max_tokens:
            columns = round_up(length)  # the rows were cut for a longer request that has left
        if columns == self.columns and rows * columns <= self._tokens:
            return
        length = min(columns, self.columns)
        kept = [layer[:, :used, :, :length].clone() for layer in self.layers] if used else []
        if rows * columns > self._tokens:
            self._take(min(self.max_tokens, max(rows * columns, self._tokens * 3 // 2)))
        self.columns = columns
        self.generation += 1
        self.layers = [self._cut(block, columns) for block in self._blocks]
        for index, old in enumerate(kept):
            self.layers[index][:, :used, :, :length] = old

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Copy rows ``sources`` to rows ``targets`` (disjoint), their first ``length`` columns."""
        src = torch.from_numpy(sources).to(self._device)
        dst = torch.from_numpy(targets).to(self._device)
        for layer in self.layers:
            cached = layer[:, :, :, :length]
            cached.index_copy_(1, dst, cached.index_select(1, src))

    @property
    def _tokens(self) -> int:
        return self._blocks[0].shape[1] if self._blocks else 0

    def _take(self, tokens: int) -> None:
        self._blocks, self.layers = [], []  # the old memory goes before the new is taken
        size = (2, tokens, self._kv_heads * self._head_dim)
        self._blocks = [torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(self._layers)]

    def _cut(self, block: torch.Tensor, columns: int) -> torch.Tensor:
        rows = block.shape[1] // columns
        return block[:, : rows * columns].view(2, rows, self._kv_heads, columns, self._head_dim)
