"""Starting two SGLang servers at once beside starting one: wall-clock and CPU seconds until all answer.

Run ``python -m benchmarks.server_startup`` after ``make sglang-cpu``. Servers have dummy weights (``--load-format
dummy``) and the router in front of them, as in a run. CPU seconds are of the servers with all that they started; on a
machine with idle cores the ratio of wall-clock time says how much of the two starts went on side by side.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from accel import select_accelerator
from benchmarks.harness import Spread, alternate, parser, ratios, report, table
from rollout.config import RolloutConfig
from rollout.deploy.config import SGLangConfig
from rollout.deploy.run_layout import run_layout
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.opening import open_servers
from train.example import write_example


async def start(servers: int) -> dict[str, float]:
    """Start so many behind a router, and end them."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = SGLangConfig(sglang_log_dir=str(directory / "logs"))
        engine = open_servers(
            RolloutConfig(engine_max_running_requests=8, engine_max_total_tokens=2048),
            config,
            run_layout(config, num_gpus=servers, num_gpus_per_engine=1),
            select_accelerator("cpu"),
            model_dir=write_example(directory / "example", 0).hf_checkpoint,
            dtype=torch.float32,
            max_context_len=128,
            load_weights=False,
            seed=0,
            threads=1,
            trust_remote_code=False,
        )
        assert isinstance(engine, SGLangEngine)
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        await engine.start()
        seconds = time.perf_counter() - started
        first_ready = min(server.ready_at for server in engine.servers)
        last_launched = max(server.launched_at for server in engine.servers)
        await engine.stop()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "seconds": seconds,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "overlap_seconds": first_ready - last_launched,
        }


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__, repeats=2).parse_args(argv)
    runs = alternate({"one": lambda _: asyncio.run(start(1)), "two": lambda _: asyncio.run(start(2))}, args.repeats)
    rows, results = [], {"runs": runs}
    for key, label in (("seconds", "seconds"), ("cpu_seconds", "CPU seconds")):
        ratio: Any = ratios([run[key] for run in runs["two"]], [run[key] for run in runs["one"]])
        results[key] = ratio
        rows.append([label, *(Spread.of([run[key] for run in runs[side]]).text(1) for side in ("one", "two"))])
        rows[-1].append(ratio.text())
    overlap = Spread.of([run["overlap_seconds"] for run in runs["two"]])
    rows.append(["both under way at once, seconds", "", overlap.text(1), ""])
    title = "From the start of SGLang servers until all answer; median (least to greatest)"
    report("server_startup", results, table(title, ["", "one server", "two at once", "ratio"], rows), args.json)


if __name__ == "__main__":
    main()
