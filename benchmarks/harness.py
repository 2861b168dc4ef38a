"""What the benchmarks share: alternating runs in processes of their own, spreads and ratios, tables and JSON.

Absolute times on a shared machine say little. Every figure here is a ratio of two sides that ran one after the other
in the same minutes, again and again, and is printed with its spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT_MARK = "benchmark-result: "


@dataclass(frozen=True)
class Spread:
    """The least, the median and the greatest of some numbers."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    def text(self, digits: int = 2) -> str:
        """``1.73 (1.61 to 1.90)``: the median, and between what it lies."""
        return f"{self.median:.{digits}f} ({self.min:.{digits}f} to {self.max:.{digits}f})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the quotients of runs that stood next to each other in time."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def alternate(sides: Mapping[str, Callable[[int], Any]], repeats: int) -> dict[str, list[Any]]:
    """Run every side once per repeat, in turn; which side goes first changes from repeat to repeat.

    A side gets the repeat's number, from 0. The result holds each side's outcomes in order of the repeats.
    """
    outcomes: dict[str, list[Any]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            print(f"  {name}, run {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
            outcomes[name].append(sides[name](repeat))
    return outcomes


def in_process(module: str, *arguments: str, threads: int = 1, timeout: float = 1800.0) -> dict[str, Any]:
    """Run ``python -m module arguments`` from the repository's root; what it handed to ``hand_back``.

    Its torch, OpenMP and BLAS use ``threads`` threads, and idle ones sleep, as the product has it for its workers.
    Raises RuntimeError with the end of its error output when it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | thread_env(threads),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if done.returncode == 0 and line.startswith(RESULT_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(RESULT_MARK))
            return result
    tail = "\n".join(done.stderr.splitlines()[-20:])
    raise RuntimeError(f"{module} {' '.join(arguments)} ended with status {done.returncode}:\n{tail}")


def hand_back(result: Mapping[str, Any]) -> None:
    """Give ``result`` to the process that called ``in_process``."""
    print(RESULT_MARK + json.dumps(result), flush=True)


def thread_env(threads: int) -> dict[str, str]:
    """Environment of one side: both sides of a comparison get the same."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }


def parser(about: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """A benchmark's command line: ``--repeats`` and ``--json``; the caller adds its own flags."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=repeats, help=f"runs of each side (default: {repeats})")
    made.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results there")
    return made


def report(name: str, results: Mapping[str, Any], table: str, path: Path | None) -> None:
    """Print the table and the results as one line of JSON; write that JSON to ``path`` too, if there is one."""
    document = json.dumps({"benchmark": name, "environment": environment(), **_plain(results)})
    print(f"\n{table}\n\n{document}", flush=True)
    if path is not None:
        path.write_text(document + "\n", encoding="utf-8")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table; the first column is left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = "-" * len(lines[0])
    return "\n".join([title, rule, lines[0], rule, *lines[1:]])


def environment() -> dict[str, Any]:
    """What the figures were taken on."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "megatron-core", "trl")}
    load = os.getloadavg()[0]
    return versions | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(load, 1),
    }


def _plain(value: Any) -> Any:
    """``value`` with every Spread as a mapping, for JSON."""
    if isinstance(value, Spread):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
