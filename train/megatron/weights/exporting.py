"""Megatron weights out again, as whole Hugging Face tensors, on every rank: for rollout engines and for files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from train.megatron.weights.binding import BoundWeight, bind
from train.megatron.weights.table import PlacedWeight

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily


@torch.no_grad()
def iter_hf_weights(model: GPTModel, family: ModelFamily, hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) for every tensor of the Hugging Face model, on every rank, in the table's order.

    Collective over the ranks that share a model: every rank iterates to the end. Dtype and device are the parameters'.
    A tied head is not yielded; vocabulary padding is cut off. With one rank a tensor may share a parameter's memory, so
    copy what has to outlive the next optimizer step.
    """
    return iter_hf_tensors(model, family, hf_config, lambda weight: weight.parameter, None)


@torch.no_grad()
def iter_hf_tensors(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    value: Callable[[BoundWeight], torch.Tensor],
    dtype: torch.dtype | None,
    wanted: Callable[[PlacedWeight], bool] = lambda _: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for anything that has a value of ``dtype`` for every element of a parameter, such as its moments.

    ``value(weight)`` has the shape of ``weight.parameter`` on this rank, and is asked for in the table's order. dtype
    None: each parameter's own. wanted: which rows.
    """
    mine = {weight.placed.megatron: weight for weight in bind(model, family, hf_config)}
    device = next(model.parameters()).device
    sources = _Sources(mine, dtype, device)
    stack: list[torch.Tensor] = []
    for placed in family.weights.place(hf_config).values():
        if placed.tied or not wanted(placed):
            continue
        weight = mine.get(placed.megatron)
        tensors = _whole_tensors(replace(weight, parameter=value(weight))) if weight else [None] * len(placed.hf)
        for name, tensor in zip(placed.hf, tensors, strict=True):
            whole = sources.fetch(placed, name, tensor)
            if placed.stack is None:
                yield name, whole
                continue
            stack.append(whole.clone())
            if len(stack) == placed.stack:
                yield name, torch.stack(stack)
                stack = []


def _whole_tensors(weight: BoundWeight) -> Sequence[torch.Tensor | None]:
    """Join the tensor-parallel ranks' slices of one parameter: one collective, then a cut per Hugging Face tensor."""
    entry = weight.placed.entry
    if entry.split is None or weight.tensor_parallel_size == 1:
        tensors = entry.transform.read(weight.parameter, weight.heads)
    else:
        parts = [entry.transform.read(slice_, weight.heads) for slice_ in _gather(weight)]
        tensors = tuple(torch.cat(pieces, dim=entry.split) for pieces in zip(*parts, strict=True))
    if entry.fused:
        return [torch.cat(tensors)]
    return [tensor[: weight.vocab_size] if entry.vocab else tensor for tensor in tensors]


def _gather(weight: BoundWeight) -> list[torch.Tensor]:
    from megatron.core import parallel_state

    slices = [torch.empty_like(weight.parameter) for _ in range(weight.tensor_parallel_size)]
    dist.all_gather(slices, weight.parameter.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return slices


@dataclass(frozen=True)
class _Owner:
    """A rank that holds a tensor, by its global number."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sources:
    """Which rank of this one's group has a tensor: another pipeline stage, or another expert-parallel rank."""

    def __init__(self, mine: dict[str, BoundWeight], dtype: torch.dtype | None, device: torch.device) -> None:
        from megatron.core import parallel_state

        self._device = device
        stages = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        self._groups = {False: stages, True: experts}
        self._owners: dict[bool, dict[str, _Owner]] = {}
        for per_expert, group in self._groups.items():
            if group.size() > 1:
                held = [w for w in mine.values() if w.placed.entry.per_expert == per_expert and not w.placed.tied]
                self._owners[per_expert] = _owners(held, dtype, group)

    def fetch(self, placed: PlacedWeight, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """The tensor, wherever it is. Collective over the group that shares it."""
        per_expert = placed.entry.per_expert
        if per_expert in self._owners:
            return _from(tensor, self._owners[per_expert][_key(placed, name)], self._groups[per_expert], self._device)
        if tensor is None:
            raise ValueError(f"the model has no parameter {placed.megatron}, which the weight table names")
        return tensor


def _key(placed: PlacedWeight, name: str) -> str:
    return f"{name} {placed.expert}"


def _owners(held: list[BoundWeight], dtype: torch.dtype | None, group: dist.ProcessGroup) -> dict[str, _Owner]:
    described: dict[str, _Owner] = {}
    for weight in held:
        for shard, _ in weight.shards(rank=0):
            shape = shard.shape[1:] if shard.index is not None else shard.shape
            described[_key(weight.placed, shard.name)] = _Owner(dist.get_rank(), shape, dtype or weight.parameter.dtype)
    ranks: list[dict[str, _Owner]] = [{} for _ in range(group.size())]
    dist.all_gather_object(ranks, described, group=group)
    owners: dict[str, _Owner] = {}
    for rank in ranks:
        for key, owner in rank.items():
            owners.setdefault(key, owner)
    return owners


def _from(tensor: torch.Tensor | None, owner: _Owner, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    if tensor is None:
        tensor = torch.empty(owner.shape, dtype=owner.dtype, device=device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=owner.rank, group=group)
    return tensor
