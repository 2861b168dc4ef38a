"""Time from the command to the first finished step of the built-in example, beside what its imports alone take.

Run ``python -m benchmarks.startup``. A step is finished when its line stands in ``metrics.jsonl``. The floor of the
inline launcher is one interpreter that imports torch, transformers and megatron.core and does nothing; that of Ray is
``ray.init`` in one process and, after it, those imports in one actor. The first command of a run, which fills the file
cache and the cache of rewritten modules, is not counted. CPU time is of the command's own process and of those that it
waited for: with Ray that is the driver, since Ray's processes belong to its daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread, alternate, parser, ratios, report, table, thread_env

ACCELRL = str(Path(sys.executable).with_name("accelrl"))
POLL_SECONDS, TIMEOUT_SECONDS = 0.01, 300.0
AIMS = {"inline": 6.0, "ray": 15.0}  # seconds on two idle cores with a warm file cache
IMPORTS = "import torch, transformers, transformers.models.auto, megatron.core"
FLOORS = {
    "inline": f"{IMPORTS}",
    "ray": f"""
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
@ray.remote
def imports():
    {IMPORTS}
ray.get(imports.remote())
""",
}


def first_step(launcher: str) -> dict[str, float]:
    """Run the command until its first step is in metrics.jsonl, and on to its end."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "run" / "metrics.jsonl"
        command = [ACCELRL, "train", "--accelerator", "cpu", "--launcher", launcher, "--num-rollout", "1"]
        command += ["--lr-warmup-iters", "0", "--progress", "off", "--output-dir", str(metrics.parent)]
        return _timed(command, lambda: metrics.exists() and metrics.stat().st_size > 0)


def floor(launcher: str) -> dict[str, float]:
    """Run the imports alone."""
    return _timed([sys.executable, "-c", FLOORS[launcher]], None)


def _timed(command: list[str], done: Callable[[], bool] | None) -> dict[str, float]:
    """Seconds until ``done`` (None: until the end), and CPU seconds to the end."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=os.environ | thread_env(1), stdout=output, stderr=subprocess.STDOUT)
        seconds: float | None = None
        while seconds is None and not _has_ended(process.pid):
            if done is not None and done():
                seconds = time.perf_counter() - started
            elif time.perf_counter() - started > TIMEOUT_SECONDS:
                process.terminate()
            time.sleep(POLL_SECONDS)
        if done is None:
            seconds = time.perf_counter() - started
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 or seconds is None:
            output.seek(0)
            tail = "\n".join(output.read().decode(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{tail}")
        return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def _has_ended(pid: int) -> bool:
    """Whether the child has ended; it stays to be waited for, since its CPU time comes with that."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=3)
    flags.add_argument("--launchers", nargs="+", choices=AIMS, default=list(AIMS))
    args = flags.parse_args(argv)
    results: dict[str, Any] = {}
    rows = []
    for launcher in args.launchers:
        first_step(launcher)
        runs = alternate(
            {"command": lambda _, which=launcher: first_step(which), "imports": lambda _, which=launcher: floor(which)},
            args.repeats,
        )
        ours, least = runs["command"], runs["imports"]
        over = {key: ratios([r[key] for r in ours], [r[key] for r in least]) for key in ("seconds", "cpu_seconds")}
        results[launcher] = {"runs": runs, "over_imports": over}
        rows += [
            [
                f"{launcher}: {label}",
                Spread.of([run[key] for run in ours]).text(1),
                Spread.of([run[key] for run in least]).text(1),
                over[key].text(),
                f"{AIMS[launcher]:.0f}" if key == "seconds" else "",
            ]
            for key, label in (("seconds", "seconds"), ("cpu_seconds", "CPU seconds"))
        ]
    title = "From the command to the first finished step of the built-in example; median (least to greatest)"
    report(
        "startup",
        {"launchers": results},
        table(title, ["", "command", "imports alone", "ratio", "aim"], rows),
        args.json,
    )


if __name__ == "__main__":
    main()
