"""The fast decoder: dense Llama, Qwen2 and Qwen3 with fused projections and a preallocated cache.

A token's results do not depend on its batch mates, bit for bit, as far as the matrix library lets them: a row of a
matrix product is the same whatever the other rows are once there are enough of them (``_MIN_ROWS``; fewer take
another kernel), attention is computed row by row, and lengths that a kernel may see are multiples of ``ROW_MULTIPLE``.
This was measured with MKL in float32; where it does not hold, rounding differs by about 1e-7 and a sampled token with
about that probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.dense_model import DenseModel
from rollout.engines.torch_engine.kv_cache import KVCache, round_up
from rollout.engines.torch_engine.weights import WeightTable
from rollout.engines.torch_engine.workspace import Workspace

_MIN_ROWS = 16
_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass: bounds its memory


@dataclass(frozen=True)
class _StepViews:
    """What a decode step needs of the cache, kept while rows and cache stay as they are."""

    key: tuple[int, int, int]
    work: Workspace
    line_starts: torch.Tensor  # int64 [rows * kv heads]: the cell of column 0
    cells: list[torch.Tensor]  # of each layer: [2 (keys, values), all cells, head dim]
    keys: list[torch.Tensor]  # as attention wants them, the columns in use
    values: list[torch.Tensor]


class DenseDecoder(Decoder):
    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_len: int,
        max_total_tokens: int | None,
        free_memory: int | None,
        threads: int,
    ) -> None:
        # Each thread gets a share of the rows of a product, and that share must not be small.
        self._model = DenseModel(config, dtype, device, min_rows=max(_MIN_ROWS, 8 * threads))
        self._shape, self._dtype, self._device = self._model.shape, dtype, device
        self._scale = self._shape.head_dim**-0.5
        self._columns = torch.arange(0, device=device)  # as long as the longest request so far, as the rotary table
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        self._views: _StepViews | None = None
        self.vocab_size = self._shape.vocab
        self._cache = KVCache(
            layers=self._shape.layers,
            kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_dim,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            max_len=max_len,
            max_total_tokens=max_total_tokens,
            free_memory=free_memory,
        )
        self.cache_tokens = self._cache.max_tokens
        self.allocate_weights()

    def fits(self, rows: int, length: int) -> bool:
        return self._cache.fits(rows, length)

    def admit(self, prompts: Sequence[Sequence[int]], source: np.ndarray, longest: int) -> torch.Tensor:
        first, added = self.count, len(source)
        self._cache.reserve(first + added, longest, used=first)
        if round_up(longest) > len(self._columns):
            self._columns = torch.arange(max(round_up(longest), 2 * len(self._columns)), device=self._device)
            self._model.reach(len(self._columns))
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths[first : first + added] = lengths[source]
        logits = torch.empty(len(prompts), self.vocab_size, dtype=self._dtype, device=self._device)
        for members in _batches(lengths):
            place = np.full(len(prompts), -1)
            place[members] = np.arange(len(members))
            mine = np.flatnonzero(place[source] >= 0)
            rows, prompt_of_row = self._to_device(first + mine), self._to_device(place[source[mine]])
            last = self._prefill([prompts[i] for i in members], rows, prompt_of_row)
            logits.index_copy_(0, self._to_device(members), last)
        self.count = first + added
        return logits.index_select(0, self._to_device(source))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, kv_heads = self.count, self._shape.kv_heads
        lengths = self._lengths[:rows]
        kv_len = round_up(int(lengths.max()) + 1)
        positions = self._to_device(lengths)
        views = self._step_views(rows, kv_len)
        cells = views.line_starts + positions.repeat_interleave(kv_heads)
        hidden = self._columns[:kv_len] > positions[:, None]
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        bias = bias[:, None, None]  # [rows, heads, query, kv_len]
        if self._dtype == torch.float32:
            bias = bias.expand(rows, kv_heads, 1, kv_len).reshape(rows * kv_heads, 1, kv_len)

        def attention(layer: int, work: Workspace) -> None:
            views.cells[layer].index_copy_(1, cells, work.new_keys_values)
            keys, values = views.keys[layer], views.values[layer]
            if self._dtype == torch.float32:
                scores = torch.baddbmm(bias, work.queries_flat, keys, alpha=self._scale)
                torch.bmm(torch.softmax(scores, dim=-1), values, out=work.context_heads)
            else:  # accumulates in float32 inside
                context = F.scaled_dot_product_attention(work.queries, keys, values, bias, scale=self._scale)
                work.context_heads.copy_(context.flatten(0, 1))

        logits = self._model.forward(views.work, tokens, positions, attention)
        lengths += lengths > 0
        return logits

    def retire(self, rows: np.ndarray) -> None:
        self._lengths[rows] = 0

    def move(self, sources: np.ndarray, targets: np.ndarray, count: int) -> None:
        if len(sources):
            self._cache.move(sources, targets, round_up(int(self._lengths[sources].max())))
            self._lengths[targets] = self._lengths[sources]
        self.count = count

    def clear(self) -> None:
        self._cache.clear()
        self.count = 0

    @property
    def weights(self) -> WeightTable:
        return self._model.weights.table

    def allocate_weights(self) -> None:
        self._model.allocate()

    def release_weights(self) -> None:
        self._model.release()

    def allocate_cache(self) -> None:
        self._cache.allocate()

    def release_cache(self) -> None:
        self._cache.release()
        self._views = None  # they hold the memory too
        self.count = 0

    def release_step(self) -> None:
        self._views = None

    def _prefill(self, prompts: Sequence[Sequence[int]], rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Compute ``prompts``, cache ``prompts[source[i]]`` in ``rows[i]``; logits after each prompt [prompts, vocab].

        Tokens of all prompts lie one behind the other; only attention sees them padded on the right, where causality
        hides the padding from every real token.
        """
        shape = self._shape
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = np.cumsum(lengths) - lengths
        width, total = round_up(int(lengths.max())), int(lengths.sum())
        tokens = np.fromiter(itertools.chain.from_iterable(prompts), dtype=np.int64, count=total)
        columns = np.arange(total) - np.repeat(starts, lengths)
        padded = self._to_device((starts[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)).reshape(-1))
        packed = self._to_device(columns + np.repeat(np.arange(len(prompts)) * width, lengths))

        def attention(layer: int, work: Workspace) -> None:
            grid = work.qkv.index_select(0, padded)
            grid = grid.view(len(prompts), width, shape.kv_heads, shape.group + 2, shape.head_dim)
            queries = grid[:, :, :, : shape.group].permute(0, 2, 3, 1, 4).flatten(1, 2)
            keys, values = grid[:, :, :, shape.group].transpose(1, 2), grid[:, :, :, shape.group + 1].transpose(1, 2)
            for cached, new in zip(self._cache.layers[layer], (keys, values), strict=True):
                cached[:, :, :width].index_copy_(0, rows, new.index_select(0, source))
            context = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=shape.group > 1
            )
            context = context.transpose(1, 2).reshape(len(prompts) * width, -1)
            torch.index_select(context, 0, packed, out=work.context[:total])

        work = self._model.workspace(total)
        ends = self._to_device(starts + lengths - 1)
        return self._model.forward(work, self._to_device(tokens), self._to_device(columns), attention, ends)

    def _step_views(self, rows: int, kv_len: int) -> _StepViews:
        key = (rows, kv_len, self._cache.generation)
        if self._views is None or self._views.key != key:
            keep = self._views is not None and self._views.work.count == rows
            layers = self._cache.layers
            keys, values = ([layer[part, :rows, :, :kv_len] for layer in layers] for part in (0, 1))
            if self._dtype == torch.float32:
                keys, values = [k.flatten(0, 1).transpose(1, 2) for k in keys], [v.flatten(0, 1) for v in values]
            self._views = _StepViews(
                key=key,
                work=self._views.work if keep and self._views is not None else self._model.workspace(rows),
                line_starts=torch.arange(rows * self._shape.kv_heads, device=self._device) * self._cache.columns,
                cells=[layer.flatten(1, 3) for layer in layers],
                keys=keys,
                values=values,
            )
        return self._views

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Prompts by length, in batches that waste little on padding and stay within ``_PREFILL_TOKENS``."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            width = round_up(int(lengths[order[end]]))
            tight = width <= 2 * round_up(int(lengths[order[start]]))
            if tight and width * (end + 1 - start) <= _PREFILL_TOKENS:
                continue
        yield order[start:end]
        start = end
