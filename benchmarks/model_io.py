"""Loading and exporting a Hugging Face model: the weight table, against mbridge's converters.

    python -m benchmarks.model_io [--repeats N] [--threads N] [--size NAME] [--dtype NAME] [--json FILE]

Both sides fill and write the same Megatron parameters, in bf16 or fp32, from and to the same file, on one rank. mbridge
knows TransformerEngine's layers only, so its side sees the parameters under TransformerEngine's names. Beside them the
limit: a plain read of the file into memory that is there already, and a plain write of as many bytes. Files are in the
page cache when they are read; every export ends with its bytes on the disk (fsync, which mbridge leaves out and is done
for it here). ``accelrl export`` of the same directory is timed with one worker and with several. Memory and bytes read
are of a fresh process that builds the model and loads it; mapped pages of the files, which the kernel may take back at
any time, are counted too.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from accel import select_accelerator
from benchmarks.harness import Spread, alternate, hand_back, in_process, parser, ratios, report, table
from benchmarks.mbridge_side import MbridgeSide
from train.config.run import RunConfig
from train.exporting import Export, export_model
from train.megatron.bootstrap import prepare_megatron
from train.megatron.model import build_model, load_hf_config
from train.megatron.models import family_of
from train.megatron.parallel import join_ranks, leave_ranks
from train.megatron.weights.loading import LoadReport, load_hf_weights
from train.megatron.weights.saving import save_hf

SHARED: dict[str, Any] = {"max_position_embeddings": 1024, "tie_word_embeddings": False}
# About 200 million parameters, and the same in little for a first look.
SIZES: dict[str, dict[str, tuple[type, type, dict[str, Any]]]] = {
    "200m": {
        "qwen3": (
            Qwen3Config, Qwen3ForCausalLM,
            {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 11,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
        ),
        "qwen3_moe": (
            Qwen3MoeConfig, Qwen3MoeForCausalLM,
            {"vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
             "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
             "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True},
        ),
    },
    "tiny": {
        "qwen3": (
            Qwen3Config, Qwen3ForCausalLM,
            {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        ),
        "qwen3_moe": (
            Qwen3MoeConfig, Qwen3MoeForCausalLM,
            {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        ),
    },
}  # fmt: skip
WORKERS = (1, 2, 4)
Timing = dict[str, float]


def write_model(size: str, name: str, directory: Path, dtype: str) -> None:
    config_class, model_class, values = SIZES[size][name]
    torch.manual_seed(0)
    model = model_class(config_class(**(SHARED | values))).to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="50GB")


@contextlib.contextmanager
def one_rank(dtype: str) -> Iterator[RunConfig]:
    accelerator = select_accelerator("cpu")
    prepare_megatron(accelerator)
    config = RunConfig.model_validate({"model": {"bf16": dtype == "bfloat16"}})
    join_ranks(config, accelerator, rank=0, world_size=1, store_path=None)
    try:
        yield config
    finally:
        leave_ranks(accelerator)


class OurSide:
    """The model and what the weight table does with it."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.hf_config = load_hf_config(directory)
        self.family = family_of(self.hf_config)
        self.model = build_model(self.hf_config, config)

    def load(self, directory: Path) -> LoadReport:
        return load_hf_weights(self.model, self.family, self.hf_config, directory)

    def save(self, target: Path, source: Path) -> None:
        save_hf(self.model, self.family, self.hf_config, target, source)


class PlainFile:
    """The limit: the bytes of the model's file, read into memory and written again."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "model.safetensors"
        self.buffer = bytearray(self.file.stat().st_size)

    def load(self) -> None:
        with io.FileIO(self.file) as file:
            view = memoryview(self.buffer)
            while view:
                view = view[file.readinto(view) :]

    def save(self, target: Path) -> None:
        target.mkdir()
        with io.FileIO(target / "model.safetensors", "w") as file:
            view = memoryview(self.buffer)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def fresh(target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return target


def measure(directory: Path, repeats: int, config: RunConfig) -> dict[str, Any]:
    ours, plain = OurSide(directory, config), PlainFile(directory)
    theirs = MbridgeSide(ours.model, ours.hf_config, next(ours.model.parameters()).dtype)
    target = directory.with_name("out")
    saves = {
        "accelrl": lambda: ours.save(target, directory),
        "mbridge": lambda: theirs.save(target),
        "plain": lambda: plain.save(target),
    }
    loads = {
        "accelrl": lambda: ours.load(directory),
        "mbridge": lambda: theirs.load(directory),
        "plain": plain.load,
    }
    expected = weights_after(ours, loads["accelrl"])
    same = weights_after(ours, loads["mbridge"])
    assert expected.keys() == same.keys()
    assert all(torch.equal(expected[key], same[key]) for key in expected), "the sides load different values"
    del expected, same
    results: dict[str, Any] = {"bytes": len(plain.buffer)}
    for what, sides in (("load", loads), ("save", saves)):

        def run(side: str, sides: dict[str, Callable[[], object]] = sides) -> Timing:
            fresh(target)
            return timed(sides[side])

        runs = alternate({side: lambda _, side=side: run(side) for side in sides}, repeats)
        for clock in ("cpu", "wall"):
            seconds = {side: [timing[clock] for timing in timings] for side, timings in runs.items()}
            results[f"{what} {clock}"] = {
                "ms": {side: Spread.of([1000 * s for s in values]) for side, values in seconds.items()},
                "mbridge / accelrl": ratios(seconds["mbridge"], seconds["accelrl"]),
                "accelrl / plain": ratios(seconds["accelrl"], seconds["plain"]),
            }
    fresh(target)
    results["export"] = measure_export(directory, target, plain, repeats)
    return results


def measure_export(directory: Path, target: Path, plain: PlainFile, repeats: int) -> dict[str, Any]:
    """``accelrl export`` of the files as they are, by so many workers, against the plain write of their bytes."""

    def export(workers: int) -> Timing:
        fresh(target)
        return timed(lambda: export_model(Export(directory, target, workers=workers)))

    def write() -> Timing:
        fresh(target)
        return timed(lambda: plain.save(target))

    sides = {str(workers): lambda _, workers=workers: export(workers) for workers in WORKERS}
    runs = alternate(sides | {"plain": lambda _: write()}, repeats)
    fresh(target)
    seconds = {side: [timing["wall"] for timing in timings] for side, timings in runs.items()}
    return {
        "ms": {side: Spread.of([1000 * s for s in values]) for side, values in seconds.items()},
        "export / plain": {str(n): ratios(seconds[str(n)], seconds["plain"]) for n in WORKERS},
    }


def weights_after(ours: OurSide, load: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What ``load`` leaves in parameters that held something else."""
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.fill_(-7.0)
    load()
    return {name: parameter.detach().clone() for name, parameter in ours.model.named_parameters()}


def resident() -> dict[str, int]:
    """Bytes of this process in memory: its own, and pages of files that it maps."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "VmRSS")}


def peak_of(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What ``work`` returns, and the most that was in memory meanwhile beyond what was before, by kind."""
    before, most, done = resident(), dict.fromkeys(("RssAnon", "RssFile", "VmRSS"), 0), threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            for name, size in resident().items():
                most[name] = max(most[name], size - before[name])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return result, {name: max(most[name], size - before[name]) for name, size in resident().items()}


def memory(directory: Path, dtype: str) -> None:
    """In a process of its own: what building the model and loading it takes."""
    with tempfile.TemporaryDirectory() as scratch, one_rank(dtype) as config:
        name = load_hf_config(directory).model_type
        write_model("tiny", name, Path(scratch), dtype)
        OurSide(Path(scratch), config).load(Path(scratch))  # imports, arenas, threads: what a first load brings along

        def work() -> tuple[OurSide, LoadReport]:
            side = OurSide(directory, config)
            return side, side.load(directory)

        (side, report), most = peak_of(work)
        layer = side.model.decoder.layers[0]
        hand_back({
            "model": size_of(side.model), "layer": size_of(layer), "bytes_read": report.bytes_read,
            "tensors": report.tensors, "file": (directory / "model.safetensors").stat().st_size,
            "own_peak": most["RssAnon"], "mapped_peak": most["RssFile"], "peak": most["VmRSS"],
        })  # fmt: skip


def size_of(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def main() -> None:
    command = parser(__doc__, repeats=5)
    command.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    command.add_argument("--size", choices=SIZES, default="200m", help="of the models (default: 200m)")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)")
    command.add_argument("--memory-of", type=Path, default=None, metavar="DIR", help="a load's memory, and no more")
    args = command.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    if args.memory_of is not None:
        memory(args.memory_of, args.dtype)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, one_rank(args.dtype) as config:
        for name in SIZES[args.size]:
            print(f"{name}:", file=sys.stderr, flush=True)
            directory = Path(scratch) / name
            write_model(args.size, name, directory, args.dtype)
            results[name] = measure(directory, args.repeats, config)
            results[name]["memory"] = in_process(
                "benchmarks.model_io", "--memory-of", str(directory), "--dtype", args.dtype, threads=args.threads
            )
            shutil.rmtree(directory)
    report("model_io", {"models": results}, tables(results), args.json)


def tables(results: dict[str, Any]) -> str:
    rows, sizes, exports = [], [], []
    for name, result in results.items():
        for what in ("load cpu", "load wall", "save cpu", "save wall"):
            part = result[what]
            ms = [part["ms"][side].text(0) for side in ("accelrl", "mbridge", "plain")]
            rows.append((f"{name}, {what}", *ms, part["mbridge / accelrl"].text(), part["accelrl / plain"].text()))
        held = result["memory"]
        megabytes = [f"{held[key] / 1e6:.1f}" for key in ("model", "layer", "own_peak", "mapped_peak", "peak")]
        sizes.append((name, *megabytes, f"{held['bytes_read'] / 1e6:.1f}", f"{held['file'] / 1e6:.1f}"))
        part = result["export"]
        for side in map(str, WORKERS):
            exports.append((f"{name}, {side}", part["ms"][side].text(0), part["ms"]["plain"].text(0),
                            part["export / plain"][side].text()))  # fmt: skip
    header = ("", "accelrl, ms", "mbridge, ms", "plain file, ms", "mbridge / accelrl", "accelrl / plain")
    columns = ("a load, MB", "model", "one layer", "peak, own", "peak, mapped", "peak, both", "read", "file")
    by_workers = ("model, workers", "export, wall ms", "plain file, ms", "export / plain")
    return "\n\n".join([
        table("Model files", header, rows), table("accelrl export", by_workers, exports),
        table("Memory of a load", columns, sizes),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
