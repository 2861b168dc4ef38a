"""``python -m train export --load DIR --to DIR``: a checkpoint's model as a Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samples.errors import InputError

if TYPE_CHECKING:
    from train.megatron.weights.checkpoint import HfCheckpoint
    from train.megatron.weights.planned import PlannedShards, PlannedTensor
    from train.megatron.weights.table import PlacedWeight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_GIGABYTES = 10**6
_MOST_WORKERS = 256
_MAPPED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Export:
    """What ``export_model`` is asked for. dtype None: as stored (FP8 blocks come out as float32)."""

    source: Path
    target: Path
    dtype: torch.dtype | None = None
    fp8_blocks: bool = False
    shard_bytes: int = 5 * 10**9
    workers: int = 1
    allow_non_finite: bool = False


def main(argv: list[str]) -> int:
    """Run ``accelrl export`` with ``argv``; returns the exit status. Raises InputError for what cannot be used."""
    arguments = _parser().parse_args(argv)
    from train.megatron.weights.directory import check_target
    from train.megatron.weights.partials import remove_leftovers

    check_target(arguments.to, "--to")
    for line in remove_leftovers(arguments.to):
        print(f"accelrl: {line}")
    export = Export(
        source=_model_directory(arguments.load),
        target=Path(arguments.to),
        dtype=DTYPES.get(arguments.dtype),
        fp8_blocks=arguments.fp8_blocks,
        shard_bytes=int(arguments.max_shard_gb * 10**9),
        workers=arguments.workers,
        allow_non_finite=arguments.allow_non_finite,
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
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers",
        type=_workers,
        default=workers,
        metavar="N",
        help=f"tensors written at once [{workers}]",
    )
    parser.add_argument("--allow-non-finite", action="store_true", help="export NaN and infinite values as they are")
    return parser


def _workers(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"has to be between 1 and {_MOST_WORKERS}, not {text}")
    return value


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
    with HfCheckpoint(export.source, "--load") as checkpoint:
        check_names(checkpoint, family, hf_config)
        check_shards(checkpoint, family, hf_config)
        shapes = family.shapes(hf_config)
        exported = [
            _exported(export, checkpoint, placed, name, shapes.get(name) or shapes[pattern])
            for placed, name, pattern in _tensors(family.weights.place(hf_config))
        ]
    planned = [tensor for one in exported for tensor in one.planned()]
    writer = ModelDirectoryWriter(export.target, export.shard_bytes)
    try:
        with writer.planned(planned) as shards:
            _write(export, exported, shards)
        writer.finish(hf_config, export.source, _quantization(exported) if export.fp8_blocks else None)
    except BaseException:
        writer.abandon()
        raise
    return len(planned)


def _write(export: Export, exported: list[_Exported], shards: PlannedShards) -> None:
    """Read, convert and write every tensor, ``workers`` at a time; the first error is raised once all have stopped."""
    from train.megatron.weights.checkpoint import HfCheckpoint

    class Opened(threading.local):
        """The source as each thread has it: what a checkpoint counts and maps is of one thread."""

        def __init__(self) -> None:
            self.checkpoint = HfCheckpoint(export.source, "--load")

    opened = Opened()

    def convert(one: _Exported) -> None:
        put(one)
        opened.checkpoint.let_go(_MAPPED_BYTES)  # no tensor of its files is in use now

    def put(one: _Exported) -> None:
        for name, tensor in one.made(opened.checkpoint, export.allow_non_finite):
            shards.put(name, tensor)

    with ThreadPoolExecutor(export.workers) as pool:
        try:
            _done([pool.submit(convert, one) for one in exported])
            _done([pool.submit(shards.sync, number) for number in range(len(shards.shards))])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    shards.check_complete()


def _done(futures: list[Future[None]]) -> None:
    for future in as_completed(futures):
        future.result()


def _tensors(placed: dict[str, PlacedWeight]) -> Iterator[tuple[PlacedWeight, str, str]]:
    seen: set[str] = set()
    for weight in placed.values():
        for name, pattern in zip(weight.hf, weight.patterns, strict=True):
            if not weight.tied and name not in seen:
                seen.add(name)
                yield weight, name, pattern


@dataclass(frozen=True)
class _Exported:
    """One tensor of the source, and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantise: bool

    def planned(self) -> list[PlannedTensor]:
        from train.megatron.weights import fp8_blocks
        from train.megatron.weights.planned import PlannedTensor

        if not self.quantise:
            return [PlannedTensor(self.name, self.dtype, self.shape)]
        scales = fp8_blocks.scale_shape((self.shape[0], self.shape[1]))
        return [
            PlannedTensor(self.name, torch.float8_e4m3fn, self.shape),
            PlannedTensor(self.name + fp8_blocks.SUFFIX, torch.float32, scales),
        ]

    def made(self, checkpoint: HfCheckpoint, allow_non_finite: bool) -> Iterator[tuple[str, torch.Tensor]]:
        from train.megatron.weights import fp8_blocks
        from train.megatron.weights.binding import Shard

        read = checkpoint.read(Shard(self.name, self.shape, None, 0, 0))
        tensor = _narrowed(read, self.dtype, self.name, allow_non_finite)
        if not self.quantise:
            yield self.name, tensor
            return
        narrow, scales = fp8_blocks.quantise(tensor)
        yield self.name, narrow
        yield self.name + fp8_blocks.SUFFIX, scales


def _exported(
    export: Export, checkpoint: HfCheckpoint, placed: PlacedWeight, name: str, shape: tuple[int, ...]
) -> _Exported:
    dtype = checkpoint.dtype(name, shape)
    if export.dtype is not None and not placed.entry.buffer:
        dtype = export.dtype
    return _Exported(name, shape, dtype, export.fp8_blocks and _is_matrix(placed, shape))


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype, name: str, allow_non_finite: bool) -> torch.Tensor:
    """In the dtype. Raises InputError, naming the tensor, for values that are none or that it cannot hold."""
    from train.megatron.weights.directory import all_finite

    if not all_finite(tensor) and not allow_non_finite:
        raise InputError(
            f"--load: {name} has values that are no numbers or infinite ({int((~tensor.isfinite()).sum())} of "
            f"{tensor.numel()}); export an earlier checkpoint, or give --allow-non-finite"
        )
    largest = torch.finfo(dtype).max
    if tensor.dtype != dtype and (tensor.isfinite() & (tensor.abs() > largest)).any():
        raise InputError(
            f"--dtype: {name} has values beyond {largest:g}, the largest of {str(dtype).removeprefix('torch.')}; "
            "they would become infinite, choose bfloat16 or float32"
        )
    return tensor.to(dtype)


def _is_matrix(placed: PlacedWeight, shape: tuple[int, ...]) -> bool:
    """Of a linear layer that FP8 kernels run: no embedding, head, norm or router."""
    inside = placed.layer is not None and not placed.entry.buffer and placed.stack is None
    return inside and len(shape) == 2 and "router." not in placed.megatron and "gate_weight" not in placed.megatron


def _quantization(exported: list[_Exported]) -> dict[str, Any]:
    from train.megatron.weights.fp8_blocks import BLOCK

    # the module: experts that are stacked in one tensor have its name before the last dot
    kept = [one.name.rpartition(".")[0] for one in exported if not one.quantise and len(one.shape) > 1]
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
