"""Megatron weights out again, as whole Hugging Face tensors: for rollout engines and for directories on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from train.megatron.weights.binding import BoundWeight, bind
from train.megatron.weights.directory import SHARD_BYTES, ModelDirectoryWriter

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily


@torch.no_grad()
def iter_hf_weights(model: GPTModel, family: ModelFamily, hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) for every tensor of the Hugging Face model, on every rank, in the table's order.

    Collective over the tensor- and pipeline-parallel groups: every rank iterates to the end. Dtype and device are the
    parameters'. A tied head is not yielded; vocabulary padding is cut off. With one rank a tensor may share a
    parameter's memory, so copy what has to outlive the next optimizer step.
    """
    return iter_hf_tensors(model, family, hf_config, lambda weight: weight.parameter, next(model.parameters()).dtype)


@torch.no_grad()
def iter_hf_tensors(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    value: Callable[[BoundWeight], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for anything that has a value of ``dtype`` for every element of a parameter, such as its moments.

    ``value(weight)`` has the shape of ``weight.parameter`` on this rank, and is asked for in the table's order.
    """
    from megatron.core import parallel_state

    mine = {weight.placed.megatron: weight for weight in bind(model, family, hf_config)}
    device = next(model.parameters()).device
    owners = _owners(mine, dtype) if parallel_state.get_pipeline_model_parallel_world_size() > 1 else {}
    for placed in family.weights.place(hf_config).values():
        if placed.tied:
            continue
        weight = mine.get(placed.megatron)
        tensors = _whole_tensors(replace(weight, parameter=value(weight))) if weight else [None] * len(placed.hf)
        for name, tensor in zip(placed.hf, tensors, strict=True):
            if owners:
                tensor = _from_stage(tensor, owners[name], device)
            if tensor is None:
                raise ValueError(f"the model has no parameter {placed.megatron}, which the weight table names")
            yield name, tensor


def _whole_tensors(weight: BoundWeight) -> Sequence[torch.Tensor | None]:
    """Join the tensor-parallel ranks' slices of one parameter: one collective, then a cut per Hugging Face tensor."""
    entry = weight.placed.entry
    if entry.split is None or weight.tensor_parallel_size == 1:
        tensors = entry.transform.read(weight.parameter, weight.heads)
    else:
        parts = [entry.transform.read(slice_, weight.heads) for slice_ in _gather(weight)]
        tensors = tuple(torch.cat(pieces, dim=entry.split) for pieces in zip(*parts, strict=True))
    return [tensor[: weight.vocab_size] if entry.vocab else tensor for tensor in tensors]


def _gather(weight: BoundWeight) -> list[torch.Tensor]:
    from megatron.core import parallel_state

    slices = [torch.empty_like(weight.parameter) for _ in range(weight.tensor_parallel_size)]
    dist.all_gather(slices, weight.parameter.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return slices


@dataclass(frozen=True)
class _Owner:
    """The pipeline stage that holds a tensor, by the global rank of its member in this rank's pipeline group."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _owners(mine: dict[str, BoundWeight], dtype: torch.dtype) -> dict[str, _Owner]:
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    held = {
        shard.name: _Owner(dist.get_rank(), shard.shape, dtype)
        for weight in mine.values()
        for shard, _ in weight.shards(rank=0)
        if not weight.placed.tied
    }
    stages: list[dict[str, _Owner]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(stages, held, group=group)
    return {name: owner for stage in stages for name, owner in stage.items()}


def _from_stage(tensor: torch.Tensor | None, owner: _Owner, device: torch.device) -> torch.Tensor:
    from megatron.core import parallel_state

    if tensor is None:
        tensor = torch.empty(owner.shape, dtype=owner.dtype, device=device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=owner.rank, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor


def save_hf(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    directory: str | Path,
    source_dir: str | Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model as a directory that transformers loads. Collective over all ranks; rank 0 writes.

    ``source_dir`` is the directory that the model came from: config, tokenizer and generation settings are taken over
    from it (None: the config alone, from ``hf_config``). Nothing is seen under ``directory`` before all of it is there.
    Where ``directory`` holds something already, the model is written beside it and InputError says where;
    ``check_target`` asks that before training starts.
    """
    writer = ModelDirectoryWriter(directory, shard_bytes) if dist.get_rank() == 0 else None
    try:
        for name, tensor in iter_hf_weights(model, family, hf_config):
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.finish(hf_config, source_dir)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    dist.barrier()
