"""Which row of the table each parameter of a built model is, on this rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.megatron.weights.engine_names import table_name
from train.megatron.weights.table import PlacedWeight
from train.megatron.weights.transforms import HeadGeometry

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Shard:
    """The part of one Hugging Face tensor that one rank holds: ``[start, stop)`` along ``axis`` (None: all of it).

    ``index``: the part is one entry along the first axis, which it does not have itself.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    axis: int | None
    start: int
    stop: int
    index: int | None = None


@dataclass(frozen=True)
class BoundWeight:
    """One parameter of this rank and the row of the table that says what it holds."""

    placed: PlacedWeight
    parameter: torch.Tensor
    heads: HeadGeometry
    vocab_size: int
    tensor_parallel_size: int

    def shards(self, rank: int) -> list[tuple[Shard, torch.Tensor]]:
        """For each Hugging Face tensor: the part that tensor-parallel rank ``rank`` holds, and the view that holds it.

        The view's first axis may be split (``Transform.folded``); a padded vocabulary's has more rows than the part.
        """
        transform = self.placed.entry.transform
        regions = transform.regions(self.parameter, self.heads)
        if self.placed.entry.fused:
            return self._fused(regions, rank)
        return [
            (self._shard(name, transform.part_shape(region), rank), region)
            for name, region in zip(self.placed.hf, regions, strict=True)
        ]

    def _fused(self, regions: tuple[torch.Tensor, ...], rank: int) -> list[tuple[Shard, torch.Tensor]]:
        (name,) = self.placed.hf
        parts = [self._shard(name, self.placed.entry.transform.part_shape(region), rank) for region in regions]
        starts = [sum(part.shape[0] for part in parts[:i]) for i in range(len(parts) + 1)]
        whole = (starts[-1], *parts[0].shape[1:])
        return [
            (Shard(name, whole, 0, first + part.start, first + part.stop), region)
            for first, part, region in zip(starts, parts, regions, strict=False)
        ]

    def _shard(self, name: str, local: tuple[int, ...], rank: int) -> Shard:
        axis, stack = self.placed.entry.split, self.placed.stack
        if stack is not None:
            return Shard(name, (stack, *local), None, 0, 0, self.placed.expert)
        whole = list(local)
        if axis is not None:
            whole[axis] *= self.tensor_parallel_size
        if self.placed.entry.vocab:
            whole[0] = self.vocab_size
        if axis is None:
            return Shard(name, tuple(whole), None, 0, 0)
        start = min(rank * local[axis], whole[axis])
        return Shard(name, tuple(whole), axis, start, min(start + local[axis], whole[axis]))


def bind(model: GPTModel, family: ModelFamily, hf_config: Any) -> Iterator[BoundWeight]:
    """This rank's parameters in the table's order. Raises ValueError for a parameter that no row names."""
    from megatron.core import parallel_state

    parameters = whole_model_names(model)
    placed = family.weights.place(hf_config)
    unnamed = sorted(parameters.keys() - placed.keys())
    if unnamed:
        raise ValueError(f"the {family.model_type} weight table has no row for {', '.join(unnamed)}")
    for name, weight in placed.items():
        if name in parameters:
            yield BoundWeight(
                weight,
                parameters[name],
                family.heads(hf_config, weight.layer),
                hf_config.vocab_size,
                parallel_state.get_tensor_model_parallel_world_size(),
            )


def whole_model_names(model: GPTModel) -> dict[str, torch.Tensor]:
    """This rank's parameters and saved buffers by the name they have in a model that no rank shares with another."""
    rename = _renaming(model)
    tensors = {rename(name): parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[rename(name)] = buffer
    return tensors


def trained_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """The parameters alone, as the very objects that an optimizer was made for."""
    rename = _renaming(model)
    return {rename(name): parameter for name, parameter in model.named_parameters()}


def _renaming(model: GPTModel) -> Callable[[str], str]:
    """Layers counted over all pipeline stages, experts over all expert-parallel ranks, names as the table has them."""
    from megatron.core import parallel_state

    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = model.config.num_moe_experts or 0
    first = experts // parallel_state.get_expert_model_parallel_world_size()
    first *= parallel_state.get_expert_model_parallel_rank()

    def rename(name: str) -> str:
        name = table_name(name)
        name = _LAYER.sub(lambda match: f"decoder.layers.{numbers[int(match[1])]}.", name, count=1)
        return _EXPERT.sub(lambda match: f".local_experts.{first + int(match[1])}.", name, count=1)

    return rename
