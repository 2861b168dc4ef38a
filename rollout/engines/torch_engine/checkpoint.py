"""Tensors of a Hugging Face model directory, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from samples.errors import InputError
from samples.model_files import read_weight_index


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of ``model_dir``: one, or those that its index names."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if single.is_file():  # before an index, as transformers and the trainer have it
        files = [single]
    elif index.is_file():
        files = [model_dir / name for name in sorted(set(read_weight_index(index).values()))]
    else:
        pickles = sorted(path.name for path in model_dir.glob("*.bin"))
        why = f"; {pickles[0]} is a pickle, which can run code when it is read: convert it" if pickles else ""
        raise InputError(f"{model_dir}: no model.safetensors and no model.safetensors.index.json there{why}")
    return files


def check_whole(model_dir: Path) -> None:
    """Raise InputError for a safetensors file that is cut short or none: its header and its size are looked at."""
    for file in checkpoint_files(model_dir):
        with _opened(file):
            pass


def read_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every stored tensor, in host memory; the rotary tables of old checkpoints are left out."""
    for file in checkpoint_files(model_dir):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a file handle, not a mapping
                if not name.endswith("rotary_emb.inv_freq"):
                    yield name, tensors.get_tensor(name)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a whole safetensors file: {error}. Was the download or copy cut short?"
        ) from error
