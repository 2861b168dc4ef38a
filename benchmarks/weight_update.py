"""New weights from a trainer process to an engine process on one machine, and what of them a delta on disk spares.

    python -m benchmarks.weight_update [--size NAME] [--bucket-bytes N] [--repeats N] [--json FILE]

The trainer's side is a Megatron model of about 200 million parameters in fp32, the other the embedded engine: real
processes with one thread each, and the channels of ``--weight-update-channel``. An update over ``tensor`` goes from the
model's parameters to the engine's, with checksums at both ends; the limit beside it is a plain copy of the same bytes
from memory to memory, in one process. Memory is what both processes hold beyond before, buffers in shared memory once.
On disk, ``disk_delta`` is measured with all tensors changed and with one in a hundred.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from accel import select_accelerator
from benchmarks.harness import Spread, alternate, parser, ratios, report, table, thread_env
from benchmarks.model_io import SHARED, SIZES
from rollout.engines.torch_engine import TorchEngine
from rollout.event_loop import EventLoopThread
from train.config.run import RunConfig
from train.example import write_example
from train.weight_sync.plan import UpdatePlan
from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd
from train.weight_sync.updater import WeightUpdater

TIMEOUT = 600.0


def write_config(size: str, directory: Path) -> None:
    """A model directory without weights: both sides make their own."""
    config_class, _, values = SIZES[size]["qwen3"]
    config_class(**(SHARED | values)).save_pretrained(directory)
    example = write_example(directory / "example", seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example.hf_checkpoint / name, directory)


class TrainerSide:
    """A Megatron model of random weights, whose tensors are sent under Hugging Face names."""

    def __init__(self, directory: Path) -> None:
        from train.megatron.bootstrap import prepare_megatron
        from train.megatron.model import build_model, load_hf_config
        from train.megatron.models import family_of
        from train.megatron.parallel import join_ranks

        accelerator = select_accelerator("cpu")
        prepare_megatron(accelerator)
        config = RunConfig()
        join_ranks(config, accelerator, rank=0, world_size=1, store_path=None)
        self.hf_config = load_hf_config(directory)
        self.family = family_of(self.hf_config)
        self.model = build_model(self.hf_config, config)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_()
        self.end = SendingEnd(self.weights, accelerator, rank=0)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from train.megatron.weights.exporting import iter_hf_weights

        return iter_hf_weights(self.model, self.family, self.hf_config)

    def change(self, share: float) -> int:
        """Change about that share of the tensors that are sent, at least one; how many bytes that makes."""
        parameters = [p for name, p in self.model.named_parameters() if "mlp.linear_fc2" in name]
        wanted = max(1, round(share * sum(1 for _ in self.weights())))
        if share >= 1:
            parameters, wanted = list(self.model.parameters()), 10**9
        with torch.no_grad():
            for parameter in parameters[:wanted]:
                parameter.add_(1.0)
        return sum(parameter.nbytes for parameter in parameters[:wanted])

    def plain_copy(self) -> dict[str, float]:
        """Seconds that copying all tensors to others takes, page by page there before."""
        sources = [parameter.data for parameter in self.model.parameters()]
        targets = [torch.zeros_like(source) for source in sources]
        best = []
        for _ in range(3):
            started = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            best.append(time.perf_counter() - started)
        return {"wall": min(best), "bytes": float(sum(source.nbytes for source in sources))}


class EngineSide:
    """The embedded engine behind blocking calls, as a rollout worker has it."""

    def __init__(self, directory: Path) -> None:
        self._loop = EventLoopThread("engine")
        accelerator = select_accelerator("cpu")
        self._engine = TorchEngine(
            directory, accelerator, dtype=torch.float32, max_running_requests=1, max_context_len=64,
            load_weights=False, threads=1,
        )  # fmt: skip
        self._loop.run(self._engine.start())
        self.end = ReceivingEnd(self, accelerator)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._loop.run(getattr(self._engine, name)(*arguments))


class Memory:
    """The most that a process held since ``start``, beyond what it held then: its own, and shared."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        self._before, self._most, self._done = self._held(), {"RssAnon": 0, "RssShmem": 0}, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def stop(self) -> dict[str, int]:
        self._done.set()
        assert self._watcher is not None
        self._watcher.join()
        return self._most

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            for name, size in self._held().items():
                self._most[name] = max(self._most[name], size - self._before[name])

    @staticmethod
    def _held() -> dict[str, int]:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")}


def serve(pipe: Any, side_class: type, directory: Path) -> None:
    """Answer calls until ``end``: the side's own, its weight channel's, or of its memory. With the CPU time taken."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    side, memory = side_class(directory), Memory()
    own = {"watch": memory.start, "watched": memory.stop, "cpu": time.process_time}
    own |= {name: getattr(side, name) for name in ("change", "plain_copy") if side_class is TrainerSide}
    pipe.send(None)
    while True:
        call, arguments = pipe.recv()
        if call == "end":
            return
        pipe.send(own[call](*arguments) if call in own else getattr(side.end, call)(*arguments))


class Process:
    def __init__(self, side_class: type, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        # By its name, under which the process finds it too.
        from benchmarks import weight_update as programs

        side = getattr(programs, side_class.__name__)
        self.process = context.Process(target=programs.serve, args=(other, side, directory), daemon=True)
        self.process.start()
        other.close()
        self.pipe.recv()

    def call(self, call: str, *arguments: Any) -> Any:
        self.pipe.send((call, arguments))
        return self.pipe.recv()


class PipeCalls:
    """``train.weight_sync.updater.Calls`` over pipes; answers come in the order of calls."""

    def __init__(self, trainer: Process, engine: Process) -> None:
        self.trainer, self.engine = trainer, engine

    def sending(self, call: str, *arguments: Any) -> Sequence[Any]:
        self.trainer.pipe.send((call, arguments))
        return [self.trainer]

    def receiving(self, call: str, *arguments: Any) -> Any:
        self.engine.pipe.send((call, arguments))
        return self.engine

    def wait(self, begun: Sequence[Any], timeout: float) -> list[Any]:  # noqa: ARG002 - nobody here falls silent
        return [process.pipe.recv() for process in begun]


def measure_tensor(calls: PipeCalls, directory: Path, bucket_bytes: int, repeats: int) -> dict[str, Any]:
    both = (calls.trainer, calls.engine)
    updater = WeightUpdater(calls, check_equal=False)
    plan, versions = UpdatePlan("tensor", bucket_bytes, TIMEOUT, str(directory)), iter(range(10**6))
    updater.open(plan)
    updater.update(next(versions))  # the engine's own weights are there from now on
    for process in both:
        process.call("close")  # gives the buffers back, which count
        process.call("watch")
    updater.open(plan)
    nbytes = updater.update(next(versions))["perf/update_weights_bytes"]
    watched = [process.call("watched") for process in both]
    extra = sum(most["RssAnon"] for most in watched) + max(most["RssShmem"] for most in watched)

    def update(_: int) -> dict[str, float]:
        before = [process.call("cpu") for process in both]
        started = time.perf_counter()
        updater.update(next(versions))
        wall = time.perf_counter() - started
        return {"wall": wall, "cpu": max(process.call("cpu") - b for process, b in zip(both, before, strict=True))}

    runs = alternate({"update": update, "copy": lambda _: calls.trainer.call("plain_copy")}, repeats)
    assert nbytes >= runs["copy"][0]["bytes"]
    speed = ratios([run["wall"] for run in runs["copy"]], [run["wall"] for run in runs["update"]])
    busiest = ratios([run["wall"] for run in runs["copy"]], [run["cpu"] for run in runs["update"]])
    return {"bytes": nbytes, "extra_bytes": extra, "speed": speed, "speed_cpu": busiest}


def measure_delta(calls: PipeCalls, directory: Path, bucket_bytes: int, repeats: int) -> dict[str, Any]:
    updater = WeightUpdater(calls, check_equal=False)
    updater.open(UpdatePlan("disk_delta", bucket_bytes, TIMEOUT, str(directory)))
    versions = iter(range(10**6, 2 * 10**6))
    updater.update(next(versions))

    def after(share: float) -> Callable[[int], dict[str, float]]:
        def update(_: int) -> dict[str, float]:
            calls.trainer.call("change", share)
            started = time.perf_counter()
            nbytes = updater.update(next(versions))["perf/update_weights_bytes"]
            return {"wall": time.perf_counter() - started, "bytes": nbytes}

        return update

    runs = alternate({"all": after(1.0), "1 %": after(0.01)}, repeats)
    return {
        "bytes": Spread.of(
            [part["bytes"] / whole["bytes"] for whole, part in zip(runs["all"], runs["1 %"], strict=True)]
        ),
        "time": ratios([run["wall"] for run in runs["1 %"]], [run["wall"] for run in runs["all"]]),
    }


def main() -> None:
    command = parser(__doc__, repeats=5)
    command.add_argument("--size", choices=SIZES, default="200m", help="of the model (default: 200m)")
    command.add_argument(
        "--bucket-bytes", type=int, default=128 << 20, help="of a bucket (default: 128 MiB, the largest tensor)"
    )
    args = command.parse_args()
    import os

    os.environ.update(thread_env(1))
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_config(args.size, directory)
        calls = PipeCalls(Process(TrainerSide, directory), Process(EngineSide, directory))
        try:
            tensor = measure_tensor(calls, directory, args.bucket_bytes, args.repeats)
            delta = measure_delta(calls, directory, args.bucket_bytes, args.repeats)
        finally:
            for process in (calls.trainer, calls.engine):
                process.pipe.send(("end", ()))
                process.process.join()
    extra = tensor["extra_bytes"] / args.bucket_bytes
    rows = [
        ("tensor: speed / plain copy of the same bytes", tensor["speed"].text()),
        ("tensor: the same, CPU time of the busier process", tensor["speed_cpu"].text()),
        ("tensor: peak extra memory, buckets", f"{extra:.2f}"),
        ("disk_delta, 1 % of tensors changed: bytes / all changed", delta["bytes"].text(3)),
        ("disk_delta, 1 % of tensors changed: time / all changed", delta["time"].text()),
    ]
    results = {"tensor": tensor | {"extra_buckets": extra}, "delta": delta, "bucket_bytes": args.bucket_bytes}
    title = f"weight updates of {tensor['bytes'] / 1e6:.0f} MB"
    report("weight_update", results, table(title, ("", "2 processes"), rows), args.json)


if __name__ == "__main__":
    main()
