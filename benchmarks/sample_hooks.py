"""What sample hooks cost: none configured, one that does nothing, and the same with path and signature looked up anew
for every sample, which is usual elsewhere. Run ``python -m benchmarks.sample_hooks``.

Times are CPU time, the least of several alternating repeats; an empty loop is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from hooks import apply_rollout_sample_hooks, load_sample_hooks
from rollout.config import RolloutConfig
from samples import Sample

NO_OP = "benchmarks.sample_hooks.no_op"
LIMIT_ONE_HOOK_NS = 3000
LIMIT_NONE_NS = 50
NO_HOOK = "no hook: as collectors call it"
ONE_HOOK = "one no-op hook: as collectors call it"


def no_op(args: Any, sample: Sample) -> None:
    """The hook that is measured."""


async def resolved_for_each_sample(args: RolloutConfig, sample: Sample, **context: Any) -> Sample:
    """The naive variant: import, look up and inspect every hook each time it is called."""
    for path in args.rollout_sample_hook_path:
        module, name = path.rsplit(".", 1)
        hook = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(hook).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        chosen = {key: value for key, value in context.items() if takes_all or key in parameters}
        returned = hook(args, sample, **chosen)
        if inspect.isawaitable(returned):
            returned = await returned
        sample = sample if returned is None else returned
    return sample


async def passes_through(_args: RolloutConfig, value: Sample) -> Sample:
    """The least that any awaited function costs."""
    return value


class Bound:
    """How every collector holds its hooks (``rollout.group.GroupRunner``): loaded once, None where there are none."""

    def __init__(self, args: RolloutConfig) -> None:
        self._args = args
        self._hooks = load_sample_hooks(args)

    async def each(self, samples: list[Sample]) -> None:
        """A call a sample, as ``GroupRunner.finish`` makes one a group."""
        for sample in samples:
            if self._hooks is not None:
                await self._hooks.apply(self._args, sample, {"rollout_id": 3, "evaluation": False})


async def each(call: Callable[..., Awaitable[Any]], args: RolloutConfig, samples: list[Sample]) -> None:
    for sample in samples:
        await call(args, sample)


async def each_with_context(call: Callable[..., Awaitable[Any]], args: RolloutConfig, samples: list[Sample]) -> None:
    for sample in samples:
        await call(args, sample, rollout_id=3, evaluation=False)


async def whole_list(args: RolloutConfig, samples: list[Sample]) -> None:
    await apply_rollout_sample_hooks(args, samples, rollout_id=3, evaluation=False)


async def empty_loop(samples: list[Sample]) -> None:
    for _ in samples:
        pass


def measure(n_samples: int, repeats: int) -> dict[str, float]:
    """CPU nanoseconds a sample for each case."""
    samples = [Sample(index=i, group_index=i // 8) for i in range(n_samples)]
    none, one = RolloutConfig(), RolloutConfig(rollout_sample_hook_path=(NO_OP,))
    ours = apply_rollout_sample_hooks
    cases: dict[str, Callable[[], Awaitable[None]]] = {
        "empty loop": lambda: empty_loop(samples),
        NO_HOOK: lambda: Bound(none).each(samples),
        "no hook: awaited call": lambda: each(ours, none, samples),
        "no hook: awaited call that does nothing (floor)": lambda: each(passes_through, none, samples),
        ONE_HOOK: lambda: Bound(one).each(samples),
        "one no-op hook: by its known name": lambda: each_with_context(ours, one, samples),
        "one no-op hook: one call for all": lambda: whole_list(one, samples),
        "one no-op hook: resolved for each sample": lambda: each_with_context(resolved_for_each_sample, one, samples),
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(repeats):
        for name, case in cases.items():
            best[name] = min(best[name], asyncio.run(_cpu_seconds(case)) / n_samples * 1e9)
    loop = best.pop("empty loop")
    return {name: max(0.0, nanoseconds - loop) for name, nanoseconds in best.items()}


async def _cpu_seconds(case: Callable[[], Awaitable[None]]) -> float:
    started = time.process_time()
    await case()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    results = measure(options.samples, options.repeats)
    naive = results["one no-op hook: resolved for each sample"]
    print(f"{'ns a sample':>12}  {'of naive':>8}")
    for name, nanoseconds in results.items():
        print(f"{nanoseconds:12.0f}  {nanoseconds / naive:8.4f}  {name}")
    summary = {
        "samples": options.samples,
        "nanoseconds_per_sample": {name: round(value, 1) for name, value in results.items()},
        "limits": {ONE_HOOK: LIMIT_ONE_HOOK_NS, NO_HOOK: LIMIT_NONE_NS},
    }
    for name, limit in ((NO_HOOK, LIMIT_NONE_NS), (ONE_HOOK, LIMIT_ONE_HOOK_NS)):
        print(f"{name}: {results[name]:.0f} ns of at most {limit}: {'ok' if results[name] <= limit else 'TOO SLOW'}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
