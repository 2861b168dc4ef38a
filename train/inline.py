"""``--launcher inline``: rollout worker and one trainer rank in this process, so that a debugger reaches everything."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accel.contract import Accelerator
from observability import Progress
from train.checkpoint.background import Published
from train.checkpoint.manifest import UNWRITTEN, Checkpoint, Manifest, RunState
from train.config.run import RunConfig
from train.loop import StepOutput
from train.megatron.weights.loading import what_ranks_read
from train.profiling import ProfilePlan
from train.replay.role import ReplayRole
from train.roles import RolloutRole, TrainerRole
from train.turns import TRAINER, WEIGHTS, Turns
from train.weight_sync.calls import DirectCalls
from train.weight_sync.factory import create_weight_updater
from train.weight_sync.updater import WeightUpdater


class InlineRuntime:
    """Both roles in one process; decoding has its own thread, training runs on the caller's."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        progress: Progress,
        run_dir: Path,
        resume: Checkpoint | None = None,
        profile: ProfilePlan | None = None,
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._progress = progress
        self._rollout: RolloutRole | ReplayRole | None = None
        self._trainer: TrainerRole | None = None
        self._resume = resume
        self._profile = profile
        self._run_dir = run_dir
        self._updater: WeightUpdater | None = None
        self._turns = Turns(config, self)
        self._version = -1 if resume is None else resume.manifest.state.weight_version - 1

    def start(self) -> None:
        trainer_threads = self._config.job.trainer_threads
        assert trainer_threads is not None
        if self._config.trainer_ranks:
            self._progress.phase("starting the trainer")
            self._trainer = TrainerRole(
                self._config,
                self._accelerator,
                rank=0,
                store_path=None,
                resume=self._resume,
                profile=self._profile,
            )
            self._progress.note(what_ranks_read([self._trainer.weights_read]))
        if self._config.debug.replays:
            self._rollout = ReplayRole(self._config)
        else:
            self._turns.before_engine()
            self._progress.phase("starting the rollout engine")
            self._rollout = RolloutRole(self._config, self._accelerator, self._resume, self._profile)
            self._rollout.start()
            torch.set_num_threads(trainer_threads)  # the rollout worker set its own for this process
        if self._trainer is not None and isinstance(self._rollout, RolloutRole):
            calls = DirectCalls(self._trainer.sending, self._rollout.receiving)
            self._updater = create_weight_updater(self._config, calls, self._run_dir, self._progress.note)
        self._turns.before_first_update()
        self._hand_over()
        self._turns.to_rollout()

    def step(self, rollout_id: int) -> StepOutput:
        assert self._rollout is not None
        batch, output = self._rollout.rollout(rollout_id)
        if self._trainer is None or output.ended:
            return output
        if batch is None:
            return output.with_metrics({"train/optimizer_steps": 0.0})
        self._turns.to_trainer()
        started = time.perf_counter()
        metrics = self._trainer.train(batch, rollout_id)
        trained = time.perf_counter()
        if isinstance(self._rollout, RolloutRole):
            self._rollout.settle()
        settled = time.perf_counter()
        self._turns.to_update()
        updating = time.perf_counter()
        metrics |= self._hand_over()
        metrics["perf/rollout_time"] = output.metrics["perf/rollout_time"] + settled - trained
        metrics["perf/train_time"] = trained - started
        metrics["perf/update_weights_time"] = time.perf_counter() - updating
        self._turns.to_rollout()
        return output.with_metrics(metrics | self._turns.metrics())

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        assert isinstance(self._rollout, RolloutRole)
        return self._rollout.evaluate(rollout_id)

    def save_state(self, directory: Path) -> RunState:
        assert self._trainer is not None
        assert isinstance(self._rollout, RolloutRole)
        with self._turns.trainer_in_between(TRAINER):
            trainer = self._trainer.save_state(directory)
        return RunState(weight_version=self._version, trainer=trainer, rollout=self._rollout.save_state(directory))

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        assert self._trainer is not None
        assert isinstance(self._rollout, RolloutRole)
        rollout = self._rollout.save_state(work)
        state = RunState(weight_version=self._version, trainer=UNWRITTEN, rollout=rollout)
        with self._turns.trainer_in_between(TRAINER):
            self._trainer.begin_save(work, draft(state))

    def saved(self, *, wait: bool) -> Published | None:
        assert self._trainer is not None
        return self._trainer.saved(wait=wait)

    def save_hf(self, directory: Path) -> None:
        assert self._trainer is not None
        with self._turns.trainer_in_between(WEIGHTS):
            self._trainer.save_hf(directory)

    def trainers(self, call: str, *arguments: Any) -> list[Any]:
        return [] if self._trainer is None else [getattr(self._trainer, call)(*arguments)]

    def rollout(self, call: str, *arguments: Any) -> Any:
        return getattr(self._rollout, call)(*arguments)

    def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        trainer, self._trainer = self._trainer, None
        try:
            if rollout is not None:
                rollout.close()
        finally:
            if trainer is not None:
                trainer.close()

    def _hand_over(self) -> dict[str, float]:
        if self._updater is None:
            return {}
        self._version += 1
        return self._updater.update(self._version)
