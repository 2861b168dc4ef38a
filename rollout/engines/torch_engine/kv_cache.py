"""Keys and values of the running requests: one block of memory per layer, cut into rows of equal length."""

from __future__ import annotations

import numpy as np
import torch

ROW_MULTIPLE = 16  # row lengths are rounded up to this: see dense.py on why results do not depend on batch mates


def round_up(length: int) -> int:
    return -(-length // ROW_MULTIPLE) * ROW_MULTIPLE


class KVCache:
    """One row per running request; token ``i`` of a request lies at column ``i`` of its row.

    A layer's tensor is [rows, kv heads, columns, 2 (key, value), head dim]: a token's key and value are written in one
    copy, and keys (or values) of all rows and heads form one strided batch for ``bmm``. With ``max_total_tokens`` the
    memory is taken once and never exceeded; without, it grows with what the running requests need. Rows are cut anew
    (contents kept) when a request needs longer ones.
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
    ) -> None:
        self._kv_heads, self._head_dim, self._layers = kv_heads, head_dim, layers
        self._dtype, self._device = dtype, device
        self._preallocate = max_total_tokens is not None
        self.max_tokens = max_total_tokens if max_total_tokens is not None else max_rows * round_up(max_len)
        self._blocks: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        self.columns = 0
        self.allocate()

    @property
    def allocated(self) -> bool:
        return bool(self._blocks)

    def allocate(self) -> None:
        self._take(self.max_tokens if self._preallocate else 0)

    def release(self) -> None:
        self._blocks, self.rows, self.columns = [], [], 0

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
        kept = [layer[:used, :, : min(columns, self.columns)].clone() for layer in self.rows] if used else []
        if rows * columns > self._tokens:
            self._take(min(self.max_tokens, max(rows * columns, self._tokens * 3 // 2)))
        self.columns = columns
        self.rows = [self._cut(block, columns) for block in self._blocks]
        for index, old in enumerate(kept):
            self.rows[index][:used, :, : old.shape[2]] = old

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Copy rows ``sources`` to rows ``targets`` (disjoint), their first ``length`` columns."""
        src = torch.from_numpy(sources).to(self._device)
        dst = torch.from_numpy(targets).to(self._device)
        for layer in self.rows:
            layer[:, :, :length].index_copy_(0, dst, layer[:, :, :length].index_select(0, src))

    @property
    def _tokens(self) -> int:
        return self._blocks[0].shape[0] if self._blocks else 0

    def _take(self, tokens: int) -> None:
        self._blocks, self.rows = [], []  # the old memory goes before the new is taken
        size = (tokens, self._kv_heads * 2 * self._head_dim)
        self._blocks = [torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(self._layers)]

    def _cut(self, block: torch.Tensor, columns: int) -> torch.Tensor:
        rows = block.shape[0] // columns
        return block[: rows * columns].view(rows, self._kv_heads, columns, 2, self._head_dim)
