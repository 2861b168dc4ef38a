"""The trainer's half of a checkpoint: fp32 weights, and moments if there are any, under Hugging Face names.

Moments go through the weight table like the weights: its transforms only cut and join, so they hold for anything that
has one value an element. A checkpoint therefore knows no layout: any number of ranks, cut in any way, can load it.
The directory is a Hugging Face model directory as well (config, tokenizer and ``model*.safetensors``, in fp32).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.manifest import FileFacts, TrainerState
from train.checkpoint.tensor_files import SHARD_BYTES, TensorFiles, write_file
from train.megatron.optimizer_state import Kind, ParameterState
from train.megatron.weights.binding import BoundWeight, bind, trained_parameters
from train.megatron.weights.checkpoint import HfCheckpoint
from train.megatron.weights.directory import carried_files, config_with_dtype
from train.megatron.weights.exporting import iter_hf_tensors
from train.megatron.weights.loading import check_names, load_weight
from train.megatron.weights.table import PlacedWeight

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily

STEMS: dict[Kind, str] = {"param": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def save_trainer_state(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    state: ParameterState,
    directory: Path,
    source_dir: Path,
    shard_bytes: int = SHARD_BYTES,
) -> TrainerState:
    """Write the trainer's files into ``directory``, which exists. Collective over all ranks; rank 0 writes.

    What the files look like is returned on rank 0, on the others without files. Raises CheckpointWriteError there, once
    all ranks are through, when something could not be written.
    """
    files: dict[str, FileFacts] = {}
    failure: OSError | None = None
    for stem, tensors in _tensors(model, family, hf_config, state):
        writer = TensorFiles(directory, stem, shard_bytes)
        # The other ranks are in the same collectives: after an error rank 0 goes on without writing.
        failure = failure or _try(partial(_write, writer, tensors))
        for _ in tensors:
            pass
        files |= writer.files
    if dist.get_rank() == 0:
        failure = failure or _try(lambda: files.update(_write_files(directory, _model_files(hf_config, source_dir))))
    steps = state.steps()
    if failure is not None:
        raise CheckpointWriteError(_why(failure)) from failure
    return TrainerState(files=files, optimizer_steps=steps)


@dataclass
class TrainerSnapshot:
    """The trainer's half of a checkpoint in host memory. ``tensors``: by file stem, then name."""

    tensors: dict[str, dict[str, torch.Tensor]]
    model_files: dict[str, bytes]
    optimizer_steps: int
    shard_bytes: int = SHARD_BYTES

    def write(self, directory: Path) -> TrainerState:
        """Write the files, giving memory back file by file. Raises CheckpointWriteError."""
        files: dict[str, FileFacts] = {}
        try:
            for stem in list(self.tensors):
                writer = TensorFiles(directory, stem, self.shard_bytes)
                tensors = self.tensors.pop(stem)
                for name in list(tensors):
                    writer.add(name, tensors.pop(name))
                writer.finish()
                files |= writer.files
            files |= _write_files(directory, self.model_files)
        except OSError as error:
            raise CheckpointWriteError(_why(error)) from error
        return TrainerState(files=files, optimizer_steps=self.optimizer_steps)


def snapshot_trainer_state(
    model: GPTModel, family: ModelFamily, hf_config: Any, state: ParameterState, source_dir: Path
) -> TrainerSnapshot | None:
    """What ``save_trainer_state`` would write, copied to rank 0's host memory; None on the others. Collective.

    Raises CheckpointWriteError on rank 0, once all ranks are through, when the model's own files cannot be read.
    """
    first = dist.get_rank() == 0
    copies: dict[str, dict[str, torch.Tensor]] = {}
    for stem, tensors in _tensors(model, family, hf_config, state):
        kept = copies.setdefault(stem, {})
        for name, tensor in tensors:
            if first:
                kept[name] = tensor.detach().to("cpu", copy=True).contiguous()
    steps = state.steps()
    if not first:
        return None
    try:
        return TrainerSnapshot(copies, _model_files(hf_config, source_dir), steps)
    except OSError as error:
        raise CheckpointWriteError(_why(error)) from error


def _tensors(
    model: GPTModel, family: ModelFamily, hf_config: Any, state: ParameterState
) -> Iterator[tuple[str, Iterator[tuple[str, torch.Tensor]]]]:
    """File stems, and the whole tensors of each, fp32 under Hugging Face names. Collective: draw all of them."""
    parameters = trained_parameters(model)
    for kind in state.kinds:

        def value(weight: BoundWeight, kind: Kind = kind) -> torch.Tensor:
            if weight.placed.entry.buffer:
                return weight.parameter.float()
            return state.gather(parameters[weight.placed.megatron], kind)

        def wanted(placed: PlacedWeight, kind: Kind = kind) -> bool:
            return kind == "param" or not placed.entry.buffer  # a buffer has no moments

        yield STEMS[kind], iter_hf_tensors(model, family, hf_config, value, torch.float32, wanted)


def load_optimizer_state(
    model: GPTModel,
    family: ModelFamily,
    hf_config: Any,
    state: ParameterState,
    directory: Path,
    optimizer_steps: int,
) -> None:
    """Set fp32 weights and moments from a checkpoint. The model's own weights were loaded from it already.

    Each rank reads the parameters of which it holds state, in its tensor-parallel part. Raises InputError for files
    that are missing, cut short or of another model.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters = trained_parameters(model)
    state.begin_loading(optimizer_steps)
    for kind in state.kinds:
        with HfCheckpoint(directory, "--load", STEMS[kind]) as checkpoint:
            check_names(checkpoint, family, hf_config, trained=kind != "param")
            for weight in bind(model, family, hf_config):
                if weight.placed.entry.buffer:
                    continue
                parameter = parameters[weight.placed.megatron]
                if state.is_held(parameter):
                    whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
                    load_weight(replace(weight, parameter=whole), checkpoint, rank)
                    state.set(parameter, kind, whole)


def _write(writer: TensorFiles, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    if dist.get_rank() != 0:
        return
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.finish()


def _model_files(hf_config: Any, source_dir: Path) -> dict[str, bytes]:
    """What makes the directory one of a Hugging Face model, by name: config and tokenizer."""
    config = config_with_dtype(hf_config, source_dir, torch.float32)
    files = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    return files | {file.name: file.read_bytes() for file in carried_files(source_dir)}


def _write_files(directory: Path, files: dict[str, bytes]) -> dict[str, FileFacts]:
    return {name: write_file(directory / name, [content]) for name, content in files.items()}


def _try(write: Callable[[], None]) -> OSError | None:
    try:
        write()
    except OSError as error:
        return error
    return None


def _why(error: OSError) -> str:
    name = Path(error.filename).name if error.filename else "a file"
    return f"{name}: {error.strerror}" if error.strerror else str(error)
