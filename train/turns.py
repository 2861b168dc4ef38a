"""Training and rollout in turn on the same devices: who gives memory back when, and what both held meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from accel.contract import MemoryInfo
from accel.memory.waiting import MemoryNotFreed, describe
from samples.errors import RunError
from train.checkpoint.errors import CheckpointWriteError
from train.config.run import RunConfig

WEIGHTS = ("weights",)
TRAINER = ("weights", "optimizer")
ENGINE_REST = ("kv_cache", "graphs")  # what an engine needs besides its weights
ENGINE = (*WEIGHTS, *ENGINE_REST)


class Sides(Protocol):
    """Calls of the two roles (``train.roles``), wherever they live; each returns when it is done."""

    def trainers(self, call: str, *arguments: Any) -> list[Any]:
        """Of every trainer rank; what they return."""
        ...

    def rollout(self, call: str, *arguments: Any) -> Any: ...


class Turns:
    """Passes the devices on. Without ``--colocate`` and ``--offload`` nothing is done.

    One side's memory is taken when the other's is free: in a step first the engine's goes and the trainer's comes, then
    the optimizer's goes and the engine's weights come, and after the update the trainer's weights go and the engine's
    cache comes. Raises RunError with the figures of both sides when memory does not become free in time.
    """

    def __init__(self, config: RunConfig, sides: Sides) -> None:
        self._sides = sides
        self._on = config.takes_turns
        self._trainer = self._on and config.offload.offloads_trainer
        self._rollout = self._on and config.offload.offloads_rollout
        self._seconds = 0.0
        self._figures: dict[str, float] = {}

    def before_engine(self) -> None:
        """The trainer is up, and the engine is to be started."""
        with self._passing():
            self._release_trainer(TRAINER)

    def before_first_update(self) -> None:
        """Both are up, the engine without weights of use."""
        with self._passing():
            self._release_rollout(ENGINE_REST)
            self._resume_trainer(WEIGHTS)

    def to_trainer(self) -> None:
        """From generating to training."""
        self._seconds, self._figures = 0.0, {}
        self._note("generating")
        with self._passing():
            self._release_rollout(ENGINE)
            self._resume_trainer(TRAINER)

    def to_update(self) -> None:
        """From training to the update of the engine's weights."""
        self._note("training")
        with self._passing():
            self._release_trainer(("optimizer",))
            self._resume_rollout(WEIGHTS)

    def to_rollout(self) -> None:
        """From the update to generating."""
        self._note("updating")
        with self._passing():
            if self._on:
                self._sides.trainers("rest")
                self._sides.rollout("rest")
            self._release_trainer(WEIGHTS)
            self._resume_rollout(ENGINE_REST)

    @contextmanager
    def trainer_in_between(self, tags: Sequence[str]) -> Iterator[None]:
        """Between two steps, the trainer with its memory of ``tags``, while the engine has none but its weights."""
        with self._passing():
            if self._trainer:
                self._release_rollout(ENGINE_REST)
            self._resume_trainer(tags)
        try:
            yield
        except CheckpointWriteError:  # the run goes on
            self._back_to_rollout(tags)
            raise
        self._back_to_rollout(tags)

    def _back_to_rollout(self, tags: Sequence[str]) -> None:
        with self._passing():
            self._release_trainer(tags)
            if self._trainer:
                self._resume_rollout(ENGINE_REST)

    def metrics(self) -> dict[str, float]:
        """Of the last step: bytes that each side held in each turn (the most of any rank), seconds of passing on."""
        return self._figures | {"perf/offload_time": self._seconds} if self._on else {}

    def _note(self, turn: str) -> None:
        if self._on:
            for side, infos in self._memory().items():
                known = [info.allocated for info in infos if info.allocated is not None]
                if known:
                    self._figures[f"memory/{side}/{turn}"] = float(max(known))

    def _memory(self) -> dict[str, list[MemoryInfo]]:
        return {"trainer": self._sides.trainers("memory"), "rollout": [self._sides.rollout("memory")]}

    def _release_trainer(self, tags: Sequence[str]) -> None:
        if self._trainer:
            self._sides.trainers("release_memory", tags)

    def _resume_trainer(self, tags: Sequence[str]) -> None:
        if self._trainer:
            self._sides.trainers("resume_memory", tags)

    def _release_rollout(self, tags: Sequence[str]) -> None:
        if self._rollout:
            self._sides.rollout("release_memory", tags)

    def _resume_rollout(self, tags: Sequence[str]) -> None:
        if self._rollout:
            self._sides.rollout("resume_memory", tags)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except MemoryNotFreed as error:
            held = [
                f"{side}{f' rank {rank}' if len(infos) > 1 else ''}: {describe(info)}"
                for side, infos in self._memory().items()
                for rank, info in enumerate(infos)
            ]
            raise RunError(f"{error}. What both sides say: {'; '.join(held)}") from error
        finally:
            self._seconds += time.perf_counter() - started
