"""Tensors of a Hugging Face model directory, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from samples.errors import InputError


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of ``model_dir``: one, or those that its index names."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [model_dir / name for name in names]
    elif single.is_file():
        files = [single]
    else:
        pickles = sorted(path.name for path in model_dir.glob("*.bin"))
        why = f"; {pickles[0]} is a pickle, which can run code when it is read: convert it" if pickles else ""
        raise InputError(f"{model_dir}: no model.safetensors and no model.safetensors.index.json there{why}")
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise InputError(f"{index}: {missing[0].name} is named there but is not in the directory")
    return files


def read_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every stored tensor, in host memory; the rotary tables of old checkpoints are left out."""
    from safetensors import safe_open

    for file in checkpoint_files(model_dir):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a file handle, not a mapping
                if not name.endswith("rotary_emb.inv_freq"):
                    yield name, tensors.get_tensor(name)
