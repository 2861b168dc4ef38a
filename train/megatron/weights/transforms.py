"""How one Megatron parameter is composed of Hugging Face tensors: as views, so that both directions are a copy.

A transform names, for every Hugging Face tensor, the region of the Megatron parameter that holds it. Loading copies
into the regions, exporting reads them. It inverts if and only if the regions cover the parameter without overlap, which
a property test checks for every transform there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadGeometry:
    """What the shape of a merged query/key/value matrix leaves open: elements per head, query heads per group."""

    head_dim: int
    queries_per_group: int


Regions = Callable[[torch.Tensor, HeadGeometry], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Transform:
    """A named rule. ``regions(parameter, heads)`` gives one view of the parameter per Hugging Face tensor, in order.

    The first ``folded`` axes of a region are one axis, the first, of the Hugging Face tensor, and the last
    ``folded_last`` are its last. A rule holds for a whole
    parameter and for a tensor-parallel slice of it alike: slicing the Hugging Face tensors and merging the slices gives
    the slice of the merged parameter.
    """

    name: str
    parts: int
    regions: Regions
    folded: int = 1
    folded_last: int = 1

    def part_shape(self, region: torch.Tensor) -> tuple[int, ...]:
        """The shape of the (sliced) Hugging Face tensor that a region holds."""
        if self.folded_last > 1:
            return (*region.shape[: -self.folded_last], math.prod(region.shape[-self.folded_last :]))
        return (math.prod(region.shape[: self.folded]), *region.shape[self.folded :])

    def read(self, parameter: torch.Tensor, heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
        """The Hugging Face tensors that a parameter holds; they share its memory where their layout allows."""
        return tuple(region.reshape(self.part_shape(region)) for region in self.regions(parameter, heads))


def _whole(parameter: torch.Tensor, _heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    return (parameter,)


def _query_groups(parameter: torch.Tensor, heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    """Megatron keeps each group's query heads, then its key head, then its value head, beside each other."""
    q = heads.queries_per_group
    grouped = parameter.unflatten(0, (-1, q + 2, heads.head_dim))
    return grouped[:, :q], grouped[:, q : q + 1], grouped[:, q + 1 :]


def _halves(parameter: torch.Tensor, _heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    return parameter.tensor_split(2, dim=0)


def _query_key_groups(parameter: torch.Tensor, heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    """The same of layers whose keys are their values too."""
    q = heads.queries_per_group
    grouped = parameter.unflatten(0, (-1, q + 1, heads.head_dim))
    return grouped[:, :q], grouped[:, q:]


def _transposed(parameter: torch.Tensor, _heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    return (parameter.transpose(0, -1),)


def _interleaved(parameter: torch.Tensor, _heads: HeadGeometry) -> tuple[torch.Tensor, ...]:
    """Gate and up alternate along the last axis, and what a weight takes in lies along the first."""
    halves = parameter.unflatten(0, (2, -1))
    return (halves.permute(*reversed(range(halves.ndim))),)


IDENTITY = Transform("identity", parts=1, regions=_whole)
MERGE_QKV = Transform("merge qkv by groups", parts=3, regions=_query_groups, folded=3)
MERGE_QK = Transform("merge qk by groups", parts=2, regions=_query_key_groups, folded=3)
MERGE_GATE_UP = Transform("merge gate and up", parts=2, regions=_halves)
TRANSPOSE = Transform("transpose", parts=1, regions=_transposed)
TRANSPOSE_GATE_UP = Transform("transpose interleaved gate and up", parts=1, regions=_interleaved, folded_last=2)

TRANSFORMS = (IDENTITY, MERGE_QKV, MERGE_QK, MERGE_GATE_UP, TRANSPOSE, TRANSPOSE_GATE_UP)
