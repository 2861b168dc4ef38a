"""What reloadable process groups cost: a collective call against a plain group's, and a cycle against a new start.

    python -m benchmarks.process_groups [--emulate] [--repeats N]

Two rank processes with one thread each, on cpu, or with --emulate on the emulated MUSA device, where the same code runs
as on a real one and the figures say nothing about any hardware. A call is an all_reduce of one number; a cycle releases
and rebuilds the world and two more groups; a new start destroys and initialises the same three. Sides take turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel import select_accelerator
from accel.comm import (
    destroy_process_group,
    init_process_group,
    release_process_groups,
    reload_process_groups,
    reloadable_groups,
)
from accel.conformance.ranks import RankPool
from accel.contract import Accelerator
from benchmarks.harness import parser, ratios, report, table

CALLS = 2000
GROUPS = 2  # beside the world


def call_costs(accelerator: Accelerator, rank: int, world: int, store: dist.Store, repeats: int) -> dict[str, Any]:
    """Microseconds of wall time for a call, by side and repeat."""
    times: dict[str, list[float]] = {"plain": [], "reloadable": []}
    value = torch.ones(1, device=accelerator.device())
    for repeat in range(repeats):
        for side in times if repeat % 2 == 0 else reversed(times):
            begin(accelerator, rank, world, dist.PrefixStore(f"{side}{repeat}", store), side)
            spent = []
            for _ in range(CALLS):
                started = time.perf_counter()
                dist.all_reduce(value)
                spent.append(time.perf_counter() - started)
            times[side].append(1e6 * statistics.median(spent))
            destroy_process_group()
    return times


def cycle_costs(accelerator: Accelerator, rank: int, world: int, store: dist.Store, repeats: int) -> dict[str, Any]:
    """Milliseconds for a cycle and for a new start, and what a release gives back."""
    times: dict[str, list[float]] = {"new start": [], "release": [], "reload": []}
    begin(accelerator, rank, world, dist.PrefixStore("first", store), "reloadable")
    freed: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for group in reloadable_groups():  # which connect, and take memory, when they are used
            dist.all_reduce(torch.ones(1, device=accelerator.device()), group=group)
        before = held(accelerator)
        release = timed(lambda: release_process_groups(accelerator))
        freed = {what: before[what] - there for what, there in held(accelerator).items()}
        reload = timed(lambda: reload_process_groups(accelerator))
        if repeat:  # the first warms up
            times["release"].append(release)
            times["reload"].append(reload)
    destroy_process_group()
    for repeat in range(repeats):

        def start_anew(number: int = repeat) -> None:
            destroy_process_group()
            begin(accelerator, rank, world, dist.PrefixStore(f"anew{number}", store), "plain")

        times["new start"].append(timed(start_anew))
    destroy_process_group()
    return {"times": times, "freed": freed}


def begin(accelerator: Accelerator, rank: int, world: int, store: dist.Store, side: str) -> None:
    reloadable = side == "reloadable"
    init_process_group(accelerator, rank=rank, world_size=world, store=store, reloadable=reloadable)
    for group in [dist.group.WORLD, *(dist.new_group(list(range(world))) for _ in range(GROUPS))]:
        dist.all_reduce(torch.ones(1, device=accelerator.device()), group=group)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def held(accelerator: Accelerator) -> dict[str, int]:
    memory = accelerator.memory_info()
    return {
        # The accelerator's library takes memory past torch's allocator; on the CPU all processes share what is free.
        "device bytes": 0 if accelerator.device_type == "cpu" else memory.total - memory.free,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    flags = parser(__doc__, repeats=9)
    flags.add_argument("--emulate", action="store_true", help="on the emulated MUSA device instead of cpu")
    args = flags.parse_args()
    accelerator = select_accelerator("musa" if args.emulate else "cpu", emulate=args.emulate)
    from benchmarks import process_groups as programs  # by its name, under which the ranks find it too

    pool = RankPool(accelerator, 2, timeout=600)
    try:
        calls = pool.run(programs.call_costs, args.repeats, group=False)[0]
        cycles = pool.run(programs.cycle_costs, args.repeats, group=False)[0]
    finally:
        pool.close()
    overhead = ratios(calls["reloadable"], calls["plain"])
    whole = [a + b for a, b in zip(cycles["times"]["release"], cycles["times"]["reload"], strict=True)]
    against = ratios(whole, cycles["times"]["new start"])
    rows = [
        ("call, reloadable / plain", overhead.text()),
        ("cycle / destroy and initialise", against.text()),
        *((f"freed by a release: {what}", amount) for what, amount in cycles["freed"].items()),
    ]
    results = {
        "call_ratio": overhead,
        "cycle_ratio": against,
        "freed": cycles["freed"],
        "accelerator": accelerator.name,
    }
    report(
        "process_groups", results, table(f"reloadable groups on {accelerator.name}", ("", "2 ranks"), rows), args.json
    )


if __name__ == "__main__":
    main()
