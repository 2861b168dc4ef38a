"""``--profile``: traces and memory records of chosen steps, made through the accelerator's contract alone."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch._C._profiler import _ExperimentalConfig

from accel.contract import Accelerator, MemoryInfo
from samples.errors import InputError
from train.config.profiling import step_range
from train.config.run import RunConfig

Half = Literal["rollout", "train"]

TRACE, MEMORY, ALLOCATIONS = ".trace.json", ".memory.json", ".allocations.pickle"
VIEWER = "https://ui.perfetto.dev"


@dataclass(frozen=True)
class ProfilePlan:
    """What is profiled: steps from 0 on, halves of them, and the directory that the files go to."""

    steps: range
    halves: tuple[Half, ...]
    directory: Path
    trainer_ranks: int

    def stems(self) -> list[str]:
        """The names of all records, without their endings."""
        stems = []
        for step in self.steps:
            if "rollout" in self.halves:
                stems.append(_stem(step, "rollout", None))
            if "train" in self.halves:
                stems += [_stem(step, "train", rank) for rank in range(self.trainer_ranks)]
        return stems

    def clear(self) -> None:
        """Remove what an earlier part of this run wrote under the same names."""
        for stem in self.stems():
            for ending in (TRACE, MEMORY, ALLOCATIONS):
                (self.directory / f"{stem}{ending}").unlink(missing_ok=True)

    def summary(self) -> list[str]:
        """What was written, and what was not, in the last lines of a run."""
        written = [f"{stem}{TRACE}" for stem in self.stems() if (self.directory / f"{stem}{TRACE}").exists()]
        missing = [stem for stem in self.stems() if f"{stem}{TRACE}" not in written]
        lines = []
        if written:
            lines.append(f"profile: {self.directory} has {_listed(written)} ({VIEWER} shows them), and memory beside")
        if missing:
            lines.append(
                f"profile: {self.directory} lacks {_listed(missing)}: the run ended before, there was nothing to train "
                "on, or it is on another node"
            )
        return lines


def profile_plan(config: RunConfig, run_dir: Path, first: int, num_rollout: int) -> ProfilePlan | None:
    """The plan of a run that makes steps ``first`` to ``num_rollout`` - 1, None without ``--profile``.

    Raises InputError for steps that the run does not make: a resumed one begins later, a replay may end earlier.
    """
    profiling = config.profiling
    if not profiling.profile:
        return None
    made = range(first, num_rollout)
    text = profiling.profile_steps
    second = made[1] if len(made) > 1 else made[0]
    steps = range(second, second + 1) if text is None else step_range(text)
    if not steps or steps[0] not in made or steps[-1] not in made:
        raise InputError(
            f"--profile-steps {text}: this run makes steps {made[0]} to {made[-1]}, counted from 0; give some of those"
        )
    there: dict[Half, bool] = {"rollout": not config.debug.replays, "train": config.trainer_ranks > 0}
    halves = tuple(half for half, is_there in there.items() if is_there and profiling.profile_what in ("all", half))
    return ProfilePlan(steps, halves, run_dir / "profile", config.trainer_ranks)


class Profiler:
    """Records one half of the planned steps in the process that does it; without a plan it does nothing.

    Each recorded step leaves a trace for Chrome or Perfetto (``.trace.json``) and the device's memory before and after
    (``.memory.json``, bytes); with ``memory_snapshot`` also the history of allocations (``.allocations.pickle``, for
    https://pytorch.org/memory_viz), which with ``oom_observer`` is written too when an allocation fails.
    """

    def __init__(self, plan: ProfilePlan | None, accelerator: Accelerator, half: Half, rank: int | None = None) -> None:
        self._plan = plan if plan is not None and half in plan.halves else None
        self._accelerator = accelerator
        self._half: Half = half
        self._rank = rank
        self._recording: Path | None = None
        capabilities = accelerator.capabilities
        self._keeps_history = capabilities.memory_snapshot
        if self._plan is not None and capabilities.memory_snapshot and capabilities.oom_observer:
            accelerator.attach_oom_observer(self._out_of_memory)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what runs inside, if ``step`` is planned; also what runs in other threads of this process."""
        if self._plan is None or step not in self._plan.steps:
            yield
            return
        base = self._plan.directory / _stem(step, self._half, self._rank)
        with contextlib.ExitStack() as recording:
            with _said_if_not_written(base):
                base.parent.mkdir(parents=True, exist_ok=True)
            recording.enter_context(self._memory(base, step))
            recording.enter_context(self._trace(base))
            yield

    @contextlib.contextmanager
    def _trace(self, base: Path) -> Iterator[None]:
        profile = torch.profiler.profile(
            activities=self._accelerator.profiler_activities(),
            record_shapes=True,
            profile_memory=True,
            # The engine decodes on a thread of its own, and rewards run on others.
            experimental_config=_ExperimentalConfig(profile_all_threads=True, trace_only=True),
        )
        profile.start()
        try:
            yield
        finally:
            self._accelerator.synchronize()  # what is still queued belongs to this step
            profile.stop()
            _write(base, TRACE, lambda path: profile.export_chrome_trace(str(path)))

    @contextlib.contextmanager
    def _memory(self, base: Path, step: int) -> Iterator[None]:
        accelerator = self._accelerator
        accelerator.reset_peak_memory()
        before = accelerator.memory_info()
        if self._keeps_history:
            accelerator.record_memory_history(enabled=True)
        self._recording = base
        try:
            yield
        finally:
            self._recording = None
            if self._keeps_history:
                _write(base, ALLOCATIONS, accelerator.save_memory_snapshot)
                accelerator.record_memory_history(enabled=False)
            record = self._record(step, before, accelerator.memory_info())
            _write(base, MEMORY, lambda path: path.write_text(json.dumps(record, indent=2) + "\n"))

    def _record(self, step: int, before: MemoryInfo, after: MemoryInfo) -> dict[str, object]:
        return {
            "step": step,
            "half": self._half,
            "rank": self._rank,
            "accelerator": self._accelerator.name,
            "device": str(self._accelerator.device()),
            "before": asdict(before),
            "after": asdict(after),
        }

    def _out_of_memory(self, device: int, allocation: int, total: int, free: int) -> None:
        """Keep the allocations at this moment: what holds them is gone once the error has unwound the stack."""
        if self._recording is None:
            return
        base = self._recording.with_name(f"{self._recording.name}_out_of_memory")
        _write(base, ALLOCATIONS, self._accelerator.save_memory_snapshot)
        print(
            f"accelrl: device {device} is out of memory: {allocation} bytes asked for, {free} free of {total}; "
            f"{base}{ALLOCATIONS} shows what holds it",
            file=sys.stderr,
        )


def _stem(step: int, half: Half, rank: int | None) -> str:
    return f"step_{step:06d}_{half}" + ("" if rank is None else f"_rank{rank}")


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _write(base: Path, ending: str, write: Callable[[Path], object]) -> None:
    """Under its name it is whole: a viewer takes half a trace for a broken one."""
    path = base.with_name(base.name + ending)
    partial = path.with_name(f".{path.name}.partial")
    with _said_if_not_written(path):
        write(partial)
        os.replace(partial, path)


@contextlib.contextmanager
def _said_if_not_written(path: Path) -> Iterator[None]:
    """A profile that cannot be written does not end the run that it looks at."""
    try:
        yield
    except OSError as error:
        print(f"accelrl: {path} could not be written: {error}", file=sys.stderr)
