"""The general decoder: any Hugging Face causal language model, through ``transformers``' own forward and caches.

Prompts are computed in groups of equal length, so that nothing is padded. Where every layer keeps plain keys and
values, groups are merged into one batch, padded on the left; where some layers do not (sliding windows, recurrent
states), each group goes on by itself. Memory of the cache is taken as responses grow; ``max_total_tokens`` bounds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from accel.modules import move_module
from rollout.engines.torch_engine.checkpoint import checkpoint_files
from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.kv_cache import round_up
from rollout.engines.torch_engine.weights import Slot, WeightTable


@dataclass
class _Batch:
    """Rows that are computed together: their place among all rows, cache, padding mask and true lengths."""

    rows: np.ndarray  # [size]
    cache: Any
    mask: torch.Tensor  # int64 [size, cached tokens]: 0 where padded
    lengths: torch.Tensor  # int64 [size]


class GeneralDecoder(Decoder):
    def __init__(
        self,
        model_dir: Path,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_len: int,
        max_total_tokens: int | None,
        load_weights: bool,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM

        trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if load_weights:
            checkpoint_files(model_dir)  # safetensors: a pickle is refused, not read
            model = AutoModelForCausalLM.from_pretrained(
                model_dir, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, **trust
            )
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **trust)
        self._model = move_module(model.eval(), device)
        self._accepted = frozenset(inspect.signature(self._model.forward).parameters)
        self._config, self._device = self._model.config, device
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        saved = self._model.state_dict()
        self._buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in saved}
        self.cache_tokens = max_total_tokens if max_total_tokens is not None else max_rows * round_up(max_len)
        self._batches: list[_Batch] = []
        self.vocab_size = self._config.get_text_config().vocab_size

    def fits(self, rows: int, length: int) -> bool:
        return rows * round_up(length) <= self.cache_tokens

    def admit(self, prompts: Sequence[Sequence[int]], source: np.ndarray, longest: int) -> torch.Tensor:  # noqa: ARG002
        lengths = np.array([len(prompt) for prompt in prompts])[source]
        logits: torch.Tensor | None = None
        for length in np.unique(lengths):
            mine = np.flatnonzero(lengths == length)
            distinct, place = np.unique(source[mine], return_inverse=True)
            batch, last = self._prefill(torch.tensor([list(prompts[i]) for i in distinct], device=self._device))
            batch.rows = self.count + mine
            _reorder(batch, self._to_device(place))
            last = last.index_select(0, self._to_device(place))
            if logits is None:
                logits = last.new_empty(len(source), last.shape[1])
            logits.index_copy_(0, self._to_device(mine), last)
            self._join(batch)
        self.count += len(source)
        assert logits is not None
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor | None = None
        for batch in self._batches:
            rows = self._to_device(batch.rows)
            batch.mask = F.pad(batch.mask, (0, 1), value=1)
            last = self._forward(tokens.index_select(0, rows)[:, None], batch.mask, batch.lengths[:, None], batch.cache)
            batch.lengths = batch.lengths + 1
            if logits is None:
                logits = last.new_empty(self.count, last.shape[1])
            logits.index_copy_(0, rows, last)
        assert logits is not None
        return logits

    def retire(self, rows: np.ndarray) -> None:
        """Nothing to do: a finished row costs its share of a step until it is dropped."""

    def move(self, sources: np.ndarray, targets: np.ndarray, count: int) -> None:
        order = np.arange(count)
        order[targets] = sources
        kept: list[_Batch] = []
        for batch in self._batches:
            place = {int(row): index for index, row in enumerate(batch.rows)}
            rows = np.flatnonzero(np.isin(order, batch.rows))
            if len(rows):
                _reorder(batch, self._to_device(np.array([place[int(row)] for row in order[rows]])))
                batch.rows = rows
                kept.append(batch)
        self._batches, self.count = kept, count

    def clear(self) -> None:
        self._batches, self.count = [], 0

    @property
    def weights(self) -> WeightTable:
        own = {name: parameter.data for name, parameter in self._model.named_parameters()} | self._buffers
        aliases = {
            name: first
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if name not in own
            for first, other in self._model.named_parameters()
            if other is parameter
        }
        on_disk = self._names_on_disk(own)
        if on_disk.keys() == own.keys():
            return WeightTable({name: Slot(data, data.shape) for name, data in own.items()}, aliases)
        # transformers keeps some of these weights in another form (fused experts): they are gathered and converted.
        staged = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in on_disk.items()}
        slots = {name: Slot(tensor, tensor.shape) for name, tensor in staged.items()}
        return WeightTable(
            slots, aliases, apply=lambda: self._convert(staged), held=lambda: self._reverted(self._model.state_dict())
        )

    def allocate_weights(self) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)

    def release_weights(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def allocate_cache(self) -> None:
        """The cache grows by itself."""

    def release_cache(self) -> None:
        self.clear()

    def _prefill(self, ids: torch.Tensor) -> tuple[_Batch, torch.Tensor]:
        """``ids`` [prompts, length]: their batch (rows not set yet) and the logits after each [prompts, vocab]."""
        from transformers import DynamicCache

        size, length = ids.shape
        cache, mask = DynamicCache(config=self._config), torch.ones_like(ids)
        positions = torch.arange(length, device=self._device).expand(size, length)
        logits = self._forward(ids, mask, positions, cache)
        return _Batch(np.arange(size), cache, mask, torch.full((size,), length, device=self._device)), logits

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        arguments = {
            "position_ids": positions,
            "logits_to_keep": 1,
            "cache": cache,  # named past_key_values before transformers 5.24, and in some models still
            "past_key_values": cache,
        }
        known = {name: value for name, value in arguments.items() if name in self._accepted}
        if "cache" in known:
            known.pop("past_key_values", None)
        return self._model(input_ids=ids, attention_mask=mask, use_cache=True, **known).logits[:, -1]

    def _join(self, batch: _Batch) -> None:
        """Merge into the batch at hand where all layers are plain keys and values; else stand beside it."""
        from transformers.cache_utils import DynamicLayer

        plain = all(type(layer) is DynamicLayer for layer in batch.cache.layers)
        if not plain or not self._batches:
            self._batches.append(batch)
            return
        held = self._batches[0]
        width = max(held.mask.shape[1], batch.mask.shape[1])
        for mine, new in zip(held.cache.layers, batch.cache.layers, strict=True):
            mine.keys = torch.cat((_pad_left(mine.keys, width), _pad_left(new.keys, width)))
            mine.values = torch.cat((_pad_left(mine.values, width), _pad_left(new.values, width)))
        masks = [F.pad(mask, (width - mask.shape[1], 0)) for mask in (held.mask, batch.mask)]
        held.mask = torch.cat(masks)
        held.lengths = torch.cat((held.lengths, batch.lengths))
        held.rows = np.concatenate((held.rows, batch.rows))

    def _names_on_disk(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names, shapes and dtypes as a checkpoint has them, found without touching the data."""
        return self._reverted(
            {name: torch.empty(data.shape, dtype=data.dtype, device="meta") for name, data in own.items()}
        )

    def _reverted(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under the names, and cut into the pieces, that a checkpoint has."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, own))

    def _convert(self, staged: dict[str, torch.Tensor]) -> None:
        fresh = type(self._model).from_pretrained(None, config=self._config, state_dict=staged, dtype=self._model.dtype)
        new = fresh.state_dict()
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(new[name])
        for name, buffer in self._buffers.items():
            buffer.copy_(new[name])

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _reorder(batch: _Batch, order: torch.Tensor) -> None:
    """Row ``i`` of the batch becomes what ``order[i]`` was; rows may be repeated or left out."""
    for layer in batch.cache.layers:
        layer.reorder_cache(order)
    batch.mask, batch.lengths = batch.mask.index_select(0, order), batch.lengths.index_select(0, order)


def _pad_left(states: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros before the cached tokens of [rows, heads, tokens, head dim] up to ``width`` tokens."""
    return F.pad(states, (0, 0, width - states.shape[-2], 0))
