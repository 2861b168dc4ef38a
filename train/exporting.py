"""``python -m train export --load DIR --to DIR``: a checkpoint's model as a Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samples.errors import InputError

if TYPE_CHECKING:
    from train.megatron.weights.table import PlacedWeight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_GIGABYTES = 10**6


@dataclass(frozen=True)
class Export:
    """What ``export_model`` is asked for. dtype None: as stored (FP8 blocks come out as float32)."""

    source: Path
    target: Path
    dtype: torch.dtype | None = None
    fp8_blocks: bool = False
    shard_bytes: int = 5 * 10**9


def main(argv: list[str]) -> int:
    """Run ``accelrl export`` with ``argv``; returns the exit status. Raises InputError for what cannot be used."""
    arguments = _parser().parse_args(argv)
    from train.megatron.weights.directory import check_target

    check_target(arguments.to, "--to")
    export = Export(
        source=_model_directory(arguments.load),
        target=Path(arguments.to),
        dtype=DTYPES.get(arguments.dtype),
        fp8_blocks=arguments.fp8_blocks,
        shard_bytes=int(arguments.max_shard_gb * 10**9),
    )
    with _ended_by_sigterm():
        count = export_model(export)
    print(f"{arguments.to}: {count} tensors of {export.source}")
    return 0


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make an exception of SIGTERM, as a batch system sends it, so that nothing half written is left behind."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train export",
        description="Write the model of a checkpoint, or of a Hugging Face directory, as a Hugging Face directory.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="a checkpoint, a run that has some, or a model")
    parser.add_argument("--to", required=True, metavar="DIR", help="directory to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=["stored", *DTYPES], default="stored", help="of the weights [stored]")
    parser.add_argument(
        "--fp8-blocks", action="store_true", help="quantise the matrices of all layers to FP8 with 128 x 128 blocks"
    )
    parser.add_argument("--max-shard-gb", type=_gigabytes, default=5.0, metavar="GB", help="size of a file [5.0]")
    return parser


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MOST_GIGABYTES:
        raise argparse.ArgumentTypeError(f"has to be above 0 and at most {_MOST_GIGABYTES}, not {text}")
    return value


def export_model(export: Export) -> int:
    """Write the directory; the number of tensors. Nothing is seen at the target before all of it is there.

    Raises InputError where the source does not hold exactly the tensors that its config asks for.
    """
    from train.megatron.model import load_hf_config
    from train.megatron.models import family_of
    from train.megatron.weights.checkpoint import HfCheckpoint
    from train.megatron.weights.directory import ModelDirectoryWriter
    from train.megatron.weights.loading import check_names, check_shards

    hf_config = load_hf_config(export.source, source="--load")
    family = family_of(hf_config, "--load")
    shapes = family.shapes(hf_config)
    count = 0
    writer = ModelDirectoryWriter(export.target, export.shard_bytes)
    kept: list[str] = []
    try:
        with HfCheckpoint(export.source, "--load") as checkpoint:
            check_names(checkpoint, family, hf_config)
            check_shards(checkpoint, family, hf_config)
            for placed, name, pattern in _tensors(family.weights.place(hf_config)):
                tensor = _read(checkpoint, name, shapes.get(name) or shapes[pattern])
                if not placed.entry.buffer and export.dtype is not None:
                    tensor = _narrowed(tensor, export.dtype, name)
                count += _add(writer, name, tensor, kept, quantise=export.fp8_blocks and _is_matrix(placed, tensor))
            writer.finish(hf_config, export.source, _quantization(kept) if export.fp8_blocks else None)
    except BaseException:
        writer.abandon()
        raise
    return count


def _tensors(placed: dict[str, PlacedWeight]) -> Iterator[tuple[PlacedWeight, str, str]]:
    seen: set[str] = set()
    for weight in placed.values():
        for name, pattern in zip(weight.hf, weight.patterns, strict=True):
            if not weight.tied and name not in seen:
                seen.add(name)
                yield weight, name, pattern


def _read(checkpoint: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from train.megatron.weights.binding import Shard

    tensor: torch.Tensor = checkpoint.read(Shard(name, shape, None, 0, 0))
    return tensor


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    if tensor.dtype != dtype and (tensor.isfinite() & (tensor.abs() > largest)).any():
        raise InputError(
            f"--dtype: {name} has values beyond {largest:g}, the largest of {str(dtype).removeprefix('torch.')}; "
            "they would become infinite, choose bfloat16 or float32"
        )
    return tensor.to(dtype)


def _is_matrix(placed: PlacedWeight, tensor: torch.Tensor) -> bool:
    """Of a linear layer that FP8 kernels run: no embedding, head, norm or router."""
    inside = placed.layer is not None and not placed.entry.buffer and placed.stack is None
    return inside and tensor.ndim == 2 and "router." not in placed.megatron and "gate_weight" not in placed.megatron


def _add(writer: Any, name: str, tensor: torch.Tensor, kept: list[str], *, quantise: bool) -> int:
    from train.megatron.weights import fp8_blocks

    if not quantise:
        if tensor.ndim > 1:  # the module: experts that are stacked in one tensor have its name before the last dot
            kept.append(name.rpartition(".")[0])
        writer.add(name, tensor)
        return 1
    narrow, scales = fp8_blocks.quantise(tensor)
    writer.add(name, narrow)
    writer.add(name + fp8_blocks.SUFFIX, scales)
    return 2


def _quantization(kept: list[str]) -> dict[str, Any]:
    from train.megatron.weights.fp8_blocks import BLOCK

    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": list(dict.fromkeys(kept)),
    }


def _model_directory(load: str) -> Path:
    from train.checkpoint.finding import check_files, find_checkpoint

    path = Path(load).expanduser().absolute()
    if any(path.glob("model*.safetensors")) and not (path / "manifest.json").exists():
        return path
    checkpoint = find_checkpoint(load, None)
    if checkpoint is None:
        raise InputError(f"--load {load}: there is no checkpoint")
    check_files(checkpoint)
    return checkpoint.directory
