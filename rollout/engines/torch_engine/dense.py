"""The fast decoder: dense Llama, Qwen2 and Qwen3 with fused projections and a preallocated cache.

A token's results do not depend on its batch mates, bit for bit, as far as the matrix library lets them: a row of a
matrix product is the same whatever the other rows are once there are enough of them (``_MIN_ROWS``; fewer take
another kernel), attention is computed row by row, and lengths that a kernel may see are multiples of ``ROW_MULTIPLE``.
This was measured with MKL in float32; where it does not hold, rounding differs by about 1e-7 and a sampled token with
about that probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.dense_weights import DenseWeights, LayerWeights, allocate, dense_shape
from rollout.engines.torch_engine.kv_cache import KVCache, round_up
from rollout.engines.torch_engine.rope import rotations
from rollout.engines.torch_engine.weights import WeightTable

_MIN_ROWS = 16
_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass: bounds its memory

# Attention over projected heads [tokens, kv heads, group + 2, head dim] of a layer: [tokens, heads * head dim].
Attention = Callable[[int, torch.Tensor], torch.Tensor]


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
        threads: int,
    ) -> None:
        self._shape = dense_shape(config)
        self._dtype, self._device = dtype, device
        self._scale = self._shape.head_dim**-0.5
        self._min_rows = max(_MIN_ROWS, 8 * threads)  # each thread gets a share of the rows, and that must not be small
        self._rotations = rotations(config, self._shape.head_dim, max_len).to(device)
        self._columns = torch.arange(round_up(max_len), device=device)
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        self._weights: DenseWeights | None = None
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
        )
        self.allocate_weights()

    def fits(self, rows: int, length: int) -> bool:
        return self._cache.fits(rows, length)

    def admit(self, prompts: Sequence[Sequence[int]], source: np.ndarray, longest: int) -> torch.Tensor:
        first, added = self.count, len(source)
        self._cache.reserve(first + added, longest, used=first)
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths[first : first + added] = lengths[source]
        logits = torch.empty(len(prompts), self.vocab_size, dtype=self._dtype, device=self._device)
        for members in _batches(lengths):
            place = np.full(len(prompts), -1)
            place[members] = np.arange(len(members))
            mine = np.flatnonzero(place[source] >= 0)
            last = self._prefill(
                [prompts[i] for i in members], self._to_device(first + mine), self._to_device(place[source[mine]])
            )
            logits.index_copy_(0, self._to_device(members), last)
        self.count = first + added
        return logits.index_select(0, self._to_device(source))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, shape = self.count, self._shape
        lengths = self._lengths[:rows]
        kv_len = round_up(int(lengths.max()) + 1)
        positions = self._to_device(lengths)
        lines = torch.arange(rows * shape.kv_heads, device=self._device)
        cells = lines * self._cache.columns + positions.repeat_interleave(shape.kv_heads)
        hidden = self._columns[:kv_len] > positions[:, None]
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        if self._dtype == torch.float32:
            bias = bias[:, None].expand(rows, shape.kv_heads, kv_len).reshape(rows * shape.kv_heads, 1, kv_len)

        def attention(layer: int, heads: torch.Tensor) -> torch.Tensor:
            cache = self._cache.rows[layer]
            cache.view(-1, 2, shape.head_dim).index_copy_(0, cells, heads[:, :, shape.group :].flatten(0, 1))
            keys, values = cache[:rows, :, :kv_len, 0], cache[:rows, :, :kv_len, 1]
            queries = heads[:, :, : shape.group]
            if self._dtype != torch.float32:  # accumulates in float32 inside
                return F.scaled_dot_product_attention(queries, keys, values, bias[:, None, None], scale=self._scale)
            scores = torch.baddbmm(bias, queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
            return torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))

        last = self._forward(tokens, positions, attention)
        lengths += lengths > 0
        return self._head(last)[:rows]

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
        return self._filled.table

    def allocate_weights(self) -> None:
        self._weights = allocate(self._shape, self._dtype, self._device)

    def release_weights(self) -> None:
        self._weights = None

    def allocate_cache(self) -> None:
        self._cache.allocate()

    def release_cache(self) -> None:
        self._cache.release()
        self.count = 0

    @property
    def _filled(self) -> DenseWeights:
        assert self._weights is not None, "weights were released"
        return self._weights

    def _prefill(self, prompts: Sequence[Sequence[int]], rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Compute ``prompts``, cache ``prompts[source[i]]`` in ``rows[i]``; logits after each prompt [prompts, vocab].

        Tokens of all prompts lie one behind the other; only attention sees them padded on the right, where causality
        hides the padding from every real token.
        """
        shape = self._shape
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = np.cumsum(lengths) - lengths
        width = round_up(int(lengths.max()))
        total = int(lengths.sum())
        tokens = np.fromiter(itertools.chain.from_iterable(prompts), dtype=np.int64, count=total)
        columns = np.arange(total) - np.repeat(starts, lengths)
        padded = self._to_device((starts[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)).reshape(-1))
        packed = self._to_device(columns + np.repeat(np.arange(len(prompts)) * width, lengths))

        def attention(layer: int, heads: torch.Tensor) -> torch.Tensor:
            grid = (
                heads.flatten(1).index_select(0, padded).view(len(prompts), width, shape.kv_heads, -1, shape.head_dim)
            )
            queries = grid[:, :, :, : shape.group].permute(0, 2, 3, 1, 4).flatten(1, 2)
            keys, values = grid[:, :, :, shape.group].transpose(1, 2), grid[:, :, :, shape.group + 1].transpose(1, 2)
            cached = grid[:, :, :, shape.group :].transpose(1, 2).index_select(0, source)
            self._cache.rows[layer][:, :, :width].index_copy_(0, rows, cached)
            context = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=shape.group > 1
            )
            return context.transpose(1, 2).reshape(len(prompts) * width, -1).index_select(0, packed)

        states = self._forward(self._to_device(tokens), self._to_device(columns), attention)
        return self._head(self._pad(states.index_select(0, self._to_device(starts + lengths - 1))))[: len(prompts)]

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states after the last layer, before the last norm: [max(tokens, _min_rows), hidden]."""
        weights, shape = self._filled, self._shape
        count = tokens.shape[0]
        turn = self._rotations.index_select(0, positions)[:, None, None]
        states = self._pad(weights.embed.index_select(0, tokens))
        for index, layer in enumerate(weights.layers):
            heads = self._project(layer, states, count, turn)
            context = self._pad(attention(index, heads).reshape(count, -1))
            states.addmm_(context, layer.out.t())
            if layer.out_bias is not None:
                states.add_(layer.out_bias)
            gate, up = F.linear(F.rms_norm(states, (shape.hidden,), layer.post_norm, shape.eps), layer.gate_up).chunk(
                2, -1
            )
            states.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down.t())
        return states

    def _project(self, layer: LayerWeights, states: torch.Tensor, count: int, turn: torch.Tensor) -> torch.Tensor:
        """[count, kv heads, group + 2, head dim]: queries and keys normed (Qwen3) and turned, values as they are."""
        shape = self._shape
        normed = F.rms_norm(states, (shape.hidden,), layer.input_norm, shape.eps)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, shape.kv_heads, shape.group + 2, shape.head_dim)[
            :count
        ]
        rotary = heads[:, :, : shape.group + 1]
        source = rotary
        if layer.qk_norm is not None:
            source = F.rms_norm(rotary, (shape.head_dim,), None, shape.eps).mul_(layer.qk_norm)
        if self._dtype == torch.float32:
            torch.mul(_as_complex(source), turn, out=_as_complex(rotary))
        else:
            rotary.copy_(torch.view_as_real(_as_complex(source.float()) * turn).flatten(-2))
        return heads

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        weights = self._filled
        return F.linear(F.rms_norm(states, (self._shape.hidden,), weights.norm, self._shape.eps), weights.head)

    def _pad(self, states: torch.Tensor) -> torch.Tensor:
        missing = self._min_rows - states.shape[0]
        return F.pad(states, (0, 0, 0, missing)) if missing > 0 else states

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _as_complex(heads: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))


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
