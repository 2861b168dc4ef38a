"""The loop, the same for every launcher: roll out, train, hand the new weights over, say what happened."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from observability import History, Progress, Tracker
from observability.transcripts import Transcript, Transcripts
from train.checkpoint.background import Published
from train.checkpoint.manifest import Manifest, RunState
from train.checkpoint.saver import CheckpointSaver


@dataclass(frozen=True)
class StepOutput:
    """What a step has to say: its metrics, and a few of its responses."""

    metrics: dict[str, float]
    transcripts: list[Transcript] = field(default_factory=list)
    ended: bool = False  # the prompts had come to their end before: this step was not made

    def with_metrics(self, more: Mapping[str, float]) -> StepOutput:
        return replace(self, metrics={**self.metrics, **more})


class Runtime(Protocol):
    """Where the workers live: in this process (``train.inline``) or on a Ray cluster (``train.cluster``)."""

    def start(self) -> None:
        """Bring up rollout worker and trainers and hand over the first weights."""
        ...

    def step(self, rollout_id: int) -> StepOutput:
        """One rollout, the training on it, and the hand-over of the new weights."""
        ...

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics (``eval/...``) of every evaluation set under the weights that answer the next rollout."""
        ...

    def save_state(self, directory: Path) -> RunState:
        """Write the trainer's files of a checkpoint into ``directory``; the whole state between two steps.

        Raises CheckpointWriteError when they cannot be written, which leaves the run as it was.
        """
        ...

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        """Take a copy of the same state, from which ``work`` is written and published while the run goes on. ``draft``
        makes the manifest of it, without the trainer's files."""
        ...

    def saved(self, *, wait: bool) -> Published | None:
        """What ``begin_save`` led to; None while it is being written. Raises CheckpointWriteError or OSError."""
        ...

    def save_hf(self, directory: Path) -> None: ...

    def close(self) -> None: ...


class StartInterrupt(KeyboardInterrupt):
    """An interrupt before the first step: nothing was trained, so nothing is finished or written first."""

    def __str__(self) -> str:
        return "interrupted during start-up; nothing was trained"


@dataclass
class StopRequest:
    """Set by the first Ctrl-C: finish the step under way, then stop. Before ``started`` it stops at once."""

    requested: bool = False
    started: bool = False  # the workers are up, and a step is worth finishing

    def start(self) -> None:
        """From here on a step under way is finished first; raises StartInterrupt where a stop was asked for before."""
        self.check_start()
        self.started = True

    def check_start(self) -> None:
        if self.requested and not self.started:  # something, such as a destructor, swallowed the interrupt
            raise StartInterrupt


@dataclass(frozen=True)
class EvaluationPlan:
    """When to evaluate: before the first step, after every ``interval`` steps, and after the last one."""

    before_train: bool = False
    interval: int | None = None
    at_end: bool = False

    def follows(self, rollout_id: int, num_rollout: int) -> bool:
        """Whether an evaluation follows step ``rollout_id``."""
        steps = rollout_id + 1
        return (self.interval is not None and steps % self.interval == 0) or (self.at_end and steps == num_rollout)


NO_EVALUATION = EvaluationPlan()


def run_loop(
    runtime: Runtime,
    *,
    num_rollout: int,
    tracker: Tracker,
    progress: Progress,
    stop: StopRequest,
    evaluations: EvaluationPlan = NO_EVALUATION,
    transcripts: Transcripts | None = None,
    first: int = 0,
    saver: CheckpointSaver | None = None,
) -> History:
    """Make steps ``first`` to ``num_rollout`` - 1, or until ``stop`` is requested; returns what was logged."""
    for rollout_id in range(first, num_rollout):
        if stop.requested:
            break
        evaluation: dict[str, float] = {}
        if rollout_id == 0 and evaluations.before_train:
            evaluation |= _before_train(_evaluate(runtime, rollout_id, progress, "before training"))
            if stop.requested:
                break
        started = time.perf_counter()
        output = runtime.step(rollout_id)
        if output.ended:
            progress.note(f"the prompts have come to their end: the run ends after {rollout_id} of {num_rollout} steps")
            break
        seconds = time.perf_counter() - started
        metrics = output.metrics
        metrics["perf/step_time"] = seconds
        metrics["perf/tokens_per_second"] = metrics.get("rollout/response_tokens", 0.0) / seconds
        if evaluations.follows(rollout_id, num_rollout) and not stop.requested:
            before = evaluation.get("perf/eval_time", 0.0)
            evaluation |= _evaluate(runtime, rollout_id, progress, f"after step {rollout_id + 1}")
            evaluation["perf/eval_time"] += before
        metrics |= evaluation
        tracker.log(rollout_id, metrics)
        if transcripts is not None:
            transcripts.add(rollout_id, output.transcripts)
        progress.step(rollout_id, metrics)
        if saver is not None:
            saver.after_step(rollout_id)
    return progress.history


def _evaluate(runtime: Runtime, rollout_id: int, progress: Progress, when: str) -> dict[str, float]:
    started = time.perf_counter()
    metrics = runtime.evaluate(rollout_id)
    seconds = time.perf_counter() - started
    means = [f"{key.removeprefix('eval/')} {value:.3f}" for key, value in metrics.items() if key.count("/") == 1]
    progress.note(f"evaluation {when}: mean reward {', '.join(means) or 'unknown'}")
    return metrics | {"perf/eval_time": seconds}


def _before_train(metrics: dict[str, float]) -> dict[str, float]:
    """One record holds both evaluations of step 0, so those of the untrained weights have a beginning of their own."""
    return {
        f"eval_before_train/{key.removeprefix('eval/')}" if key.startswith("eval/") else key: value
        for key, value in metrics.items()
    }


@contextmanager
def stop_on_interrupt(stop: StopRequest) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM) asks for a stop after the current step; a second one interrupts at once.

    During start-up the first one interrupts at once too: no step is under way that could be lost.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        if not stop.started:
            raise StartInterrupt
        name = signal.Signals(signum).name
        print(f"\n{name}: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    previous = {sig: signal.signal(sig, handle) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)
