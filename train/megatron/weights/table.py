"""The weight table of a model family: Megatron name pattern, Hugging Face names, transform, tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.megatron.weights.transforms import IDENTITY, Transform

COLUMN, ROW, REPLICATED = 0, 1, None
"""Axis along which tensor-parallel ranks share a weight: output features, input features, or none."""


LayerChoice = Callable[[Any, int], bool]
"""(Hugging Face config, layer from 0) -> whether a row is there in that layer."""


@dataclass(frozen=True)
class WeightEntry:
    """One row. ``{layer}`` in the names counts from 0 over the whole model, whatever stage a layer lives on.

    ``{expert}`` likewise counts over all experts of a layer, whatever expert-parallel rank one lives on; a row that has
    it in Megatron's name only is of a Hugging Face tensor that stacks the experts along its first axis.

    split: the axis of parameter and Hugging Face tensors alike that tensor-parallel ranks share; whole experts live on
    one rank. vocab: axis 0 is the vocabulary, padded in Megatron to a multiple of the tensor-parallel size; the padding
    is zero and never exported. tied_to: the Hugging Face tensor that stands in where the model's config ties the two.
    where: the layers that have the row (None: all). buffer: no optimizer trains it; it keeps its own dtype. fused: the
    one Hugging Face tensor is all that the transform joins, one after the other along its first axis.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform = IDENTITY
    split: int | None = REPLICATED
    vocab: bool = False
    tied_to: str | None = None
    where: LayerChoice | None = None
    buffer: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if len(self.hf) != (1 if self.fused else self.transform.parts):
            raise ValueError(
                f"{self.megatron}: {self.transform.name} joins {self.transform.parts} tensors, {len(self.hf)} named"
            )
        if self.fused and self.split != COLUMN:
            raise ValueError(f"{self.megatron}: fused tensors are split along the axis that joins them")
        if self.per_expert and self.split is not None:
            raise ValueError(f"{self.megatron}: experts are not split between tensor-parallel ranks")

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    @property
    def stacked(self) -> bool:
        return self.per_expert and "{expert}" not in self.hf[0]


@dataclass(frozen=True)
class PlacedWeight:
    """A row filled in: the whole model's name of a parameter and the Hugging Face tensors it holds.

    ``tied``: it holds a copy of another parameter's tensor, which is exported only once. ``layer``, ``expert``: whose
    it is, None outside of them. ``stack``: it is one of that many experts in a stacked tensor; None where none is.
    """

    entry: WeightEntry
    megatron: str
    hf: tuple[str, ...]
    tied: bool = False
    layer: int | None = None
    expert: int | None = None
    stack: int | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """``hf`` with ``{layer}`` and ``{expert}`` left open."""
        return (self.entry.tied_to,) if self.tied and self.entry.tied_to else self.entry.hf


@dataclass(frozen=True)
class WeightTable:
    """All rows of a family. ``ignored``: names that checkpoints hold and no model reads, ``{layer}`` left open.

    experts: how many a layer has, by the config. beyond: beginnings of further names, by the config, that are no part
    of the model that is trained.
    """

    entries: tuple[WeightEntry, ...]
    ignored: tuple[str, ...] = ()
    experts: Callable[[Any], int] | None = None
    beyond: Callable[[Any], tuple[str, ...]] | None = None

    def place(self, hf_config: Any) -> dict[str, PlacedWeight]:
        """Fill the rows in for one model; keys are Megatron's names, in checkpoint order (embedding, layers, head).

        Raises ValueError where two rows name the same parameter or the same Hugging Face tensor.
        """
        placed: dict[str, PlacedWeight] = {}
        taken: dict[tuple[str, int | None], str] = {}
        for weight in self._rows(hf_config):
            if weight.megatron in placed:
                raise ValueError(f"two rows of the weight table name the parameter {weight.megatron}")
            for name in () if weight.tied else weight.hf:
                part = (name, weight.expert if weight.stack else None)
                if part in taken:
                    raise ValueError(f"{name} belongs to two parameters: {taken[part]} and {weight.megatron}")
                taken[part] = weight.megatron
            placed[weight.megatron] = weight
        return placed

    def _rows(self, hf_config: Any) -> list[PlacedWeight]:
        rows: list[PlacedWeight] = []
        for per_layer, group in groupby(self.entries, key=lambda entry: entry.per_layer):
            entries = list(group)
            layers: list[int | None] = list(range(hf_config.num_hidden_layers)) if per_layer else [None]
            for layer in layers:
                for entry in entries:
                    rows += self._fill(entry, layer, hf_config)
        return rows

    def _fill(self, entry: WeightEntry, layer: int | None, hf_config: Any) -> Iterator[PlacedWeight]:
        if entry.where is not None and not entry.where(hf_config, -1 if layer is None else layer):
            return
        tied = bool(hf_config.tie_word_embeddings) and entry.tied_to is not None
        patterns = (entry.tied_to,) if tied and entry.tied_to else entry.hf
        count = self.experts(hf_config) if entry.per_expert and self.experts else None
        for expert in range(count) if count is not None else [None]:
            names = tuple(pattern.format(layer=layer, expert=expert) for pattern in patterns)
            megatron = entry.megatron.format(layer=layer, expert=expert)
            stack = count if entry.stacked else None
            yield PlacedWeight(entry, megatron, names, tied, layer, expert, stack)

    def ignored_names(self, hf_config: Any) -> set[str]:
        """The ignored names of one model."""
        return {name.format(layer=layer) for name in self.ignored for layer in range(hf_config.num_hidden_layers)}
