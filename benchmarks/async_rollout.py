"""How busy the fully asynchronous collector keeps an engine, and how much sooner it learns than rollouts in turn.

Run ``python -m benchmarks.async_rollout``. Three parts:

- ``busy``: a simulated engine with 64 slots and long-tailed generation times of 50 ms on average (log-normal, sigma 1).
  Its slots' busy share under our collector, and under a worker that looks once a second whether slots are free and
  fills them up, which is usual elsewhere. A step's groups are taken as soon as they are there, with a bound of
  staleness that never binds.
- ``books``: 20,000 groups through the same engine, of which 1 % of the attempts raise and 1 % are aborted: each prompt
  is trained on exactly once.
- ``learn``: seconds from the first rollout until five rollouts in a row of the built-in example have a mean reward of
  0.9, each mode with the rollout in a process of its own (``--launcher ray``), in turn.

Time in the first two parts is this process's own CPU time plus the waiting, which is skipped: what the collector costs
counts, what other processes do to a shared machine does not. ``learn`` is on the wall clock and needs a quiet machine
with at least two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import ROOT, Spread, alternate, parser, ratios, report, table, thread_env
from observability import RolloutMetrics
from rollout.collectors.fully_async import FullyAsyncCollector
from rollout.collectors.screening import Screen
from rollout.config import RolloutConfig
from samples.sample import Group, Sample, Status
from samples.source import SourceCounts

T = TypeVar("T")

SLOTS, MEAN_SECONDS, SIGMA = 64, 0.05, 1.0
BATCH, STALENESS = 32, 1000
GOAL, WINDOW = 0.9, 5
MODES = ("sync", "one-step-off", "fully-async")


class _SkippingSelector(selectors.SelectSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.skipped += max(0.0, timeout or 0.0)
        return []


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its time is CPU time plus what it would have waited."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped + time.process_time()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(coroutine)


def now() -> float:
    return asyncio.get_running_loop().time()


class Prompts:
    """Prompts 0, 1, 2, ... up to ``size``; returned ones come first."""

    counts = SourceCounts(0, 0, 0, 0)

    def __init__(self, size: int) -> None:
        self._fresh = iter(range(size))
        self._line: list[int] = []

    def next_groups(self, n: int) -> list[Group]:
        returned, self._line = self._line[:n], self._line[n:]
        fresh = [index for _, index in zip(range(n - len(returned)), self._fresh, strict=False)]
        return [[Sample(index=index, group_index=index, prompt_row=index, epoch=0)] for index in returned + fresh]

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None:
        self._line = [_index(group) for group in groups] + self._line

    def state_dict(self, in_flight: Iterable[Group] = ()) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SimulatedEngine:
    """Answers after a long-tailed time; knows how busy its slots were."""

    def __init__(self, seed: int, *, failing: float = 0.0, aborting: float = 0.0) -> None:
        self._chance = random.Random(seed)
        self._failing, self._aborting = failing, aborting
        self._running = 0
        self._since = self._began = now()
        self._area = 0.0

    def seconds(self) -> float:
        return MEAN_SECONDS * self._chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)

    async def answer(self, group: Group, params: Any = None, *, rollout_id: int = 0) -> None:
        self._count(1)
        try:
            await asyncio.sleep(self.seconds())
        finally:
            self._count(-1)
        draw = self._chance.random()
        if draw < self._failing:
            raise RuntimeError("a simulated failure")
        for sample in group:
            sample.status = Status.ABORTED if draw < self._failing + self._aborting else Status.COMPLETED
            sample.reward, sample.response_length = 1.0, 1

    async def finish(self, group: Group, *, rollout_id: int, group_index: int | None = None) -> float:
        return 0.0

    async def stop(self) -> None: ...

    def go_on(self) -> None: ...

    def busy(self) -> float:
        """Share of the slots' time until now in which they generated."""
        self._count(0)
        return self._area / (SLOTS * (self._since - self._began))

    def _count(self, change: int) -> None:
        time_now = now()
        self._area += self._running * (time_now - self._since)
        self._since = time_now
        self._running += change


def collector(engine: SimulatedEngine, prompts: int) -> FullyAsyncCollector:
    config = RolloutConfig(
        rollout_mode="fully-async",
        rollout_batch_size=BATCH,
        max_weight_staleness=STALENESS,
        max_groups_in_flight=SLOTS,
        max_group_retries=20,
    )
    return FullyAsyncCollector(
        config,
        runner=engine,
        source=Prompts(prompts),
        screen=Screen(None, None, None),
        metrics=RolloutMetrics(),
        num_rollout=10**9,
        clock=now,
    )


async def ours(groups: int, seed: int) -> float:
    """Busy share of the slots until ``groups`` were trained on."""
    engine = SimulatedEngine(seed)
    collecting = collector(engine, 10**9)
    for step in range(groups // BATCH):
        await collecting.collect(step)
        collecting.weights_updated(step + 1)
    busy = engine.busy()
    await collecting.close()
    return busy


async def topping_up(groups: int, seed: int) -> float:
    """The same of a worker that wakes up once a second, takes what is done and fills the slots up."""
    engine = SimulatedEngine(seed)
    source, running, done = Prompts(10**9), set[asyncio.Task[None]](), 0
    while done < groups:
        finished = {task for task in running if task.done()}
        done += len(finished)
        running -= finished
        for group in source.next_groups(SLOTS - len(running)):
            running.add(asyncio.create_task(engine.answer(group)))
        await asyncio.sleep(1.0)
    busy = engine.busy()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return busy


async def books(groups: int, seed: int) -> dict[str, Any]:
    """What became of ``groups`` prompts of which 1 % of the attempts fail and 1 % are aborted."""
    engine = SimulatedEngine(seed, failing=0.01, aborting=0.01)
    collecting, trained, step = collector(engine, groups), Counter[int](), 0
    while not (output := await collecting.collect(step)).ended:
        trained.update(map(_index, output.groups))
        step += 1
        collecting.weights_updated(step)
    totals = collecting.places.totals
    await collecting.close()
    return {
        "prompts": groups,
        "lost": groups - len(trained),
        "doubled": sum(count - 1 for count in trained.values()),
        "retried": totals.retried,
        "aborted": totals.aborted,
        "busy": engine.busy(),
    }


def learn(mode: str, seed: int) -> dict[str, Any]:
    """Seconds, and rollouts, until the example is learned; a run that does not get there counts with all its time."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        command = [sys.executable, "-m", "train", "--accelerator", "cpu", "--rollout-mode", mode, "--seed", str(seed)]
        command += ["--output-dir", str(run), "--progress", "off", "--no-report", "--no-use-tensorboard"]
        command += ["--eval-interval", "none"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | thread_env(1), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [row["rollout/raw_reward"] for row in rows]
    reached = next(
        (i + 1 for i in range(WINDOW - 1, len(rows)) if sum(rewards[i - WINDOW + 1 : i + 1]) / WINDOW >= GOAL), 0
    )
    counted = rows[: reached or len(rows)]
    return {
        "seconds": sum(row["perf/step_time"] for row in counted),
        "rollouts": len(counted),
        "reached": bool(reached),
        "final": sum(rewards[-10:]) / len(rewards[-10:]),
    }


def _index(group: Group) -> int:
    index = group[0].group_index
    assert index is not None
    return index


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=3)
    flags.add_argument("--groups", type=int, default=20_000, help="groups of the books; a quarter for each busy share")
    flags.add_argument("--parts", nargs="+", choices=("busy", "books", "learn"), default=["busy", "books", "learn"])
    flags.add_argument("--seed", type=int, default=0, help="the first seed; one more for every repeat")
    args: argparse.Namespace = flags.parse_args(argv)
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    if "busy" in args.parts:
        busy = alternate(
            {
                "ours": lambda i: run(ours(args.groups // 4, args.seed + i)),
                "topping up": lambda i: run(topping_up(args.groups // 4, args.seed + i)),
            },
            args.repeats,
        )
        results["busy"] = {side: Spread.of(values) for side, values in busy.items()}
        rows += [[f"slots busy, {side}", Spread.of(values).text(3)] for side, values in busy.items()]
        rows.append(["slots busy, times", ratios(busy["ours"], busy["topping up"]).text(1)])
    if "books" in args.parts:
        results["books"] = run(books(args.groups, args.seed))
        rows += [[f"books, {key}", value] for key, value in results["books"].items()]
    if "learn" in args.parts:
        runs = alternate({mode: lambda i, mode=mode: learn(mode, args.seed + i) for mode in MODES}, args.repeats)
        results["learn"] = runs
        for mode, outcomes in runs.items():
            seconds = Spread.of([run["seconds"] for run in outcomes]).text(1)
            rollouts = Spread.of([run["rollouts"] for run in outcomes]).text(0)
            never = sum(not run["reached"] for run in outcomes)
            rows.append(
                [f"seconds to {GOAL}, {mode}", f"{seconds}; rollouts {rollouts}" + f"; never: {never}" * (never > 0)]
            )
        for mode in MODES[1:]:
            sooner = ratios([r["seconds"] for r in runs["sync"]], [r["seconds"] for r in runs[mode]])
            rows.append([f"times sooner than sync, {mode}", sooner.text()])
    title = f"Fully asynchronous rollout: {SLOTS} slots, {MEAN_SECONDS * 1000:.0f} ms on average"
    report("async_rollout", results, table(title, ["", "median (least to greatest)"], rows), args.json)


if __name__ == "__main__":
    main()
