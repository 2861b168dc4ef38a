"""The weight table of a model family: Megatron name pattern, Hugging Face names, transform, tensor-parallel axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.megatron.weights.transforms import IDENTITY, Transform

COLUMN, ROW, REPLICATED = 0, 1, None
"""Axis along which tensor-parallel ranks share a weight: output features, input features, or none."""


@dataclass(frozen=True)
class WeightEntry:
    """One row. ``{layer}`` in the names counts from 0 over the whole model, whatever stage a layer lives on.

    split: the axis of parameter and Hugging Face tensors alike that tensor-parallel ranks share. vocab: axis 0 is the
    vocabulary, padded in Megatron to a multiple of the tensor-parallel size; the padding is zero and never exported.
    tied_to: the Hugging Face tensor that stands in where the model's config ties the two.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform = IDENTITY
    split: int | None = REPLICATED
    vocab: bool = False
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if len(self.hf) != self.transform.parts:
            raise ValueError(
                f"{self.megatron}: {self.transform.name} joins {self.transform.parts} tensors, {len(self.hf)} named"
            )

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron


@dataclass(frozen=True)
class PlacedWeight:
    """A row filled in: the whole model's name of a parameter and the Hugging Face tensors it holds.

    ``tied``: it holds a copy of another parameter's tensor, which is exported only once.
    """

    entry: WeightEntry
    megatron: str
    hf: tuple[str, ...]
    tied: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        """``hf`` with ``{layer}`` left open."""
        return (self.entry.tied_to,) if self.tied and self.entry.tied_to else self.entry.hf


@dataclass(frozen=True)
class WeightTable:
    """All rows of a family. ``ignored``: names that old checkpoints hold and no model reads."""

    entries: tuple[WeightEntry, ...]
    ignored: tuple[str, ...] = ()

    def place(self, hf_config: Any) -> dict[str, PlacedWeight]:
        """Fill the rows in for one model; keys are Megatron's names, in checkpoint order (embedding, layers, head).

        Raises ValueError where two rows name the same parameter or the same Hugging Face tensor.
        """
        placed: dict[str, PlacedWeight] = {}
        taken: dict[str, str] = {}
        for weight in self._rows(hf_config):
            if weight.megatron in placed:
                raise ValueError(f"two rows of the weight table name the parameter {weight.megatron}")
            for name in () if weight.tied else weight.hf:
                if name in taken:
                    raise ValueError(f"{name} belongs to two parameters: {taken[name]} and {weight.megatron}")
                taken[name] = weight.megatron
            placed[weight.megatron] = weight
        return placed

    def _rows(self, hf_config: Any) -> list[PlacedWeight]:
        rows: list[PlacedWeight] = []
        for per_layer, group in groupby(self.entries, key=lambda entry: entry.per_layer):
            entries = list(group)
            layers: list[int | None] = list(range(hf_config.num_hidden_layers)) if per_layer else [None]
            rows += [_fill(entry, layer, bool(hf_config.tie_word_embeddings)) for layer in layers for entry in entries]
        return rows

    def ignored_names(self, hf_config: Any) -> set[str]:
        """The ignored names of one model."""
        return {name.format(layer=layer) for name in self.ignored for layer in range(hf_config.num_hidden_layers)}


def _fill(entry: WeightEntry, layer: int | None, tie: bool) -> PlacedWeight:
    tied = tie and entry.tied_to is not None
    names = (entry.tied_to,) if tied and entry.tied_to else entry.hf
    return PlacedWeight(entry, entry.megatron.format(layer=layer), tuple(n.format(layer=layer) for n in names), tied)
