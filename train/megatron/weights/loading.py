"""Hugging Face weights into this rank's Megatron model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samples.errors import InputError
from train.megatron.weights.binding import BoundWeight, Shard, bind
from train.megatron.weights.checkpoint import HfCheckpoint

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily

_RANKS_IN_A_LINE = 8
_MAPPED_BYTES = 64 * 2**20
_LEAST_MAPPED_BYTES = 4 * 2**20  # opening files again takes as long as reading a part of that


@dataclass(frozen=True)
class LoadReport:
    """What one rank read: Hugging Face tensors (whole or in part) and bytes."""

    tensors: int
    bytes_read: int

    def __add__(self, other: LoadReport) -> LoadReport:
        return LoadReport(self.tensors + other.tensors, self.bytes_read + other.bytes_read)


def what_ranks_read(reports: Sequence[LoadReport]) -> str:
    """A line on what each rank read of the model's files, or where they are many, the least and the most."""
    sizes = [f"{report.bytes_read / 1e6:,.1f} MB in {report.tensors} tensors" for report in reports]
    if len(reports) <= _RANKS_IN_A_LINE:
        return "weights read: " + "; ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
    order = sorted(range(len(reports)), key=lambda rank: reports[rank].bytes_read)
    least, most = (f"rank {rank} {sizes[rank]}" for rank in (order[0], order[-1]))
    return f"weights read by {len(reports)} ranks: least {least}; most {most}"


@torch.no_grad()
def load_hf_weights(
    model: GPTModel, family: ModelFamily, hf_config: Any, directory: str | Path, source: str = "--hf-checkpoint"
) -> LoadReport:
    """Fill every parameter of ``model`` (as ``build_model`` made it) from the safetensors files in ``directory``.

    Each rank maps the files and reads only its own slices; values are converted to the parameters' dtype. Raises
    InputError, naming ``source`` and the file, for tensors that are missing, unknown, misshapen, of a dtype that holds
    no weights, or in a file that is cut short.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    tensors = 0
    beyond = _half_a_layer(model)
    with HfCheckpoint(directory, source) as checkpoint:
        check_names(checkpoint, family, hf_config)
        for weight in bind(model, family, hf_config):
            tensors += load_weight(weight, checkpoint, rank, beyond)
        return LoadReport(tensors, checkpoint.bytes_read)


def load_weight(weight: BoundWeight, checkpoint: HfCheckpoint, rank: int, beyond: int = _MAPPED_BYTES) -> int:
    """Fill ``weight.parameter`` with what tensor-parallel rank ``rank`` holds; the number of tensors read.

    beyond: bytes of the files that may stay mapped; larger tensors are read a few rows at a time.
    """
    shards = weight.shards(rank)
    for shard, region in shards:
        rows = shard.stop - shard.start
        if weight.placed.entry.vocab:
            region[rows:].zero_()
            region = region[:rows]
        for piece, place in _pieces(shard, region, checkpoint, beyond):
            place.copy_(checkpoint.read(piece).view(place.shape))
            checkpoint.let_go(beyond)
    return len(shards)


def _pieces(
    shard: Shard, region: torch.Tensor, checkpoint: HfCheckpoint, most_bytes: int
) -> Iterator[tuple[Shard, torch.Tensor]]:
    """A shard as it is, or a few rows after the other, where that can be done."""
    size = region.numel() * region.element_size()
    whole = size <= most_bytes or shard.index is not None or shard.axis not in (None, 0)
    if whole or region.ndim != len(shard.shape) or not checkpoint.can_be_cut(shard.name):
        yield shard, region
        return
    rows = max(1, region.shape[0] * most_bytes // size)
    for first in range(0, region.shape[0], rows):
        place = region[first : first + rows]
        start = shard.start + first
        yield replace(shard, axis=0, start=start, stop=start + place.shape[0]), place


def _half_a_layer(model: GPTModel) -> int:
    """Bytes of a usual layer's half: what reading it may take beside the model itself."""
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in model.decoder.layers]
    return max(min(sizes, default=0) // 2, _LEAST_MAPPED_BYTES)


def check_weights(family: ModelFamily, hf_config: Any, directory: str | Path, source: str = "--hf-checkpoint") -> None:
    """Raise InputError for all that ``load_hf_weights`` would, by the files' headers: no model is built.

    What only the values tell, a tied head that is no copy of the embedding, is left to the loading.
    """
    shapes = family.shapes(hf_config)
    with HfCheckpoint(directory, source) as checkpoint:
        check_names(checkpoint, family, hf_config, values=False)
        check_shards(checkpoint, family, hf_config)
        for weight in family.weights.place(hf_config).values():
            for pattern, name in zip(weight.patterns, weight.hf, strict=True):
                checkpoint.check(name, shapes.get(name) or shapes[pattern])


def check_shards(checkpoint: HfCheckpoint, family: ModelFamily, hf_config: Any) -> None:
    """Raise InputError where the index and the files that it names do not agree; every header is read."""
    beyond = family.weights.beyond(hf_config) if family.weights.beyond else ()
    checkpoint.check_shards((*family.weights.ignored_names(hf_config), *beyond))


def check_names(
    checkpoint: HfCheckpoint, family: ModelFamily, hf_config: Any, *, values: bool = True, trained: bool = False
) -> None:
    """Raise InputError unless the files hold exactly the tensors of this model (values: and tied ones are copies).

    trained: only those that an optimizer trains.
    """
    placed = [w for w in family.weights.place(hf_config).values() if not (trained and w.entry.buffer)]
    tied = [weight for weight in placed if weight.tied]
    checkpoint.check_names(
        expected=[name for weight in placed for name in weight.hf],
        optional=family.weights.ignored_names(hf_config) | {name for weight in tied for name in weight.entry.hf},
        beyond=family.weights.beyond(hf_config) if family.weights.beyond else (),
    )
    for weight in tied if values else ():
        _check_copy(checkpoint, weight.entry.hf[0], weight.hf[0])


def _check_copy(checkpoint: HfCheckpoint, copy: str, original: str) -> None:
    """A tied tensor that the file holds all the same has to be the copy that the config says it is."""
    if copy not in checkpoint.file_of:
        return
    same = torch.equal(*(checkpoint.read_whole(name) for name in (copy, original)))
    checkpoint.let_go()
    if not same:
        raise InputError(
            f"{checkpoint.source} {checkpoint.directory}: tie_word_embeddings is true in config.json, but {copy} and "
            f"{original} differ; set it to false if the model has a head of its own"
        )
