"""A Hugging Face directory of the model in training, its shards written by several ranks at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from samples.errors import InputError
from train.checkpoint.errors import DISK_ERRORS, CheckpointWriteError
from train.megatron.weights.directory import SHARD_BYTES, ModelDirectoryWriter
from train.megatron.weights.exporting import iter_hf_weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily

Failure = OSError | InputError
_MOST_NAMED = 3


def save_hf(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    directory: str | Path,
    source_dir: str | Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model as a directory that transformers loads. Collective over all ranks.

    Every rank that sees rank 0's directory (all, on a file system that they share) writes its part of the shards.
    ``source_dir`` is the directory that the model came from: config, tokenizer and generation settings are taken over
    from it (None: the config alone, from ``hf_config``). Nothing is seen under ``directory`` before all of it is there.
    Where ``directory`` holds something already, the model is written beside it and InputError says where;
    ``check_target`` asks that before training starts. An error of one rank's is raised on all of them.
    """
    writer = _begin(directory, shard_bytes)
    failure: Failure | None = None
    try:
        for name, tensor in iter_hf_weights(model, family, hf_config):
            failure = failure or _try(partial(writer.add, name, tensor))  # the others are in the same collectives
        failure = failure or _try(writer.flush)
        _agree(directory, failure)
        for name in writer.non_finite[:_MOST_NAMED]:
            what = f"{name} has values that are no numbers or infinite, and they are written as they are"
            print(f"accelrl: --save-hf {directory}: {what}", file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            failure = _try(partial(writer.finish, hf_config, source_dir))
        _agree(directory, failure)
    except BaseException:
        if dist.get_rank() == 0:
            writer.abandon()
        raise


def _begin(directory: str | Path, shard_bytes: int) -> ModelDirectoryWriter:
    """This rank's writer into the directory that rank 0 makes."""
    first = dist.get_rank() == 0
    made: list[ModelDirectoryWriter] = []
    failure = _try(lambda: made.append(ModelDirectoryWriter(directory, shard_bytes))) if first else None
    _agree(directory, failure)
    work: list[Path | None] = [made[0].work if first else None]
    dist.broadcast_object_list(work, src=0)
    path = work[0]
    assert path is not None
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, path.is_dir())
    writing = [rank for rank, sees in enumerate(seen) if sees]
    rank = dist.get_rank()
    writer = made[0] if first else ModelDirectoryWriter(directory, shard_bytes, work=path)
    writer.share(writing.index(rank) if rank in writing else None, len(writing))
    return writer


def _try(write: Callable[[], None]) -> Failure | None:
    try:
        write()
    except (OSError, InputError) as error:
        return error
    return None


def _agree(directory: str | Path, failure: Failure | None) -> None:
    """Raise this rank's failure, or a CheckpointWriteError about another's."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failure is None else str(failure))
    if isinstance(failure, OSError) and failure.errno in DISK_ERRORS:
        # a worker's error is understood by the driver if it is one of ours
        raise CheckpointWriteError(f"--save-hf {directory}: cannot be written ({failure.strerror})") from failure
    if failure is not None:
        raise failure
    for rank, why in enumerate(said):
        if why is not None:
            raise CheckpointWriteError(f"--save-hf {directory}: cannot be written by rank {rank} ({why})")
