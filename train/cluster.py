"""``--launcher ray``: the roles as Ray actors, on a cluster started here or joined with ``--ray-address``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.contract import Accelerator
from accel.placement.requests import ray_node_options
from observability import Progress
from train.actors import any_died, plain_errors
from train.checkpoint.background import Published
from train.checkpoint.manifest import UNWRITTEN, Checkpoint, Manifest, RolloutState, RunState
from train.collection import spare_from_collection
from train.config.run import RunConfig
from train.local_ray import LocalRay, prepare_environment
from train.loop import StepOutput
from train.placement import Placement
from train.replay.role import ReplayRole
from train.trainer_release import TrainerRelease
from train.turns import TRAINER, WEIGHTS, Turns

if TYPE_CHECKING:
    from train.profiling import ProfilePlan
    from train.weight_sync.updater import WeightUpdater

_CLOSE_TIMEOUT = 20.0


class RayRuntime:
    """Driver of the actors. Refs of batches and weights pass through here, their data goes from actor to actor."""

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
        self._run_dir = run_dir
        self._rollout: Any = None
        self._replay: ReplayRole | None = None
        self._trainers: list[Any] = []
        self._released: TrainerRelease | None = None
        if config.job.release_train:
            self._released = TrainerRelease(run_dir / "released_trainer", _CLOSE_TIMEOUT)
        self._placement = Placement(config, accelerator, run_dir, profile)
        self._resume = resume
        self._version = -1 if resume is None else resume.manifest.state.weight_version - 1
        self._updater: WeightUpdater | None = None
        self._turns = Turns(config, self)
        self._local_ray = LocalRay()
        self._ray_imported = False
        self._start_interrupted = False

    def start(self) -> None:
        try:
            self._start()
        except KeyboardInterrupt:
            self._start_interrupted = True
            raise

    def _start(self) -> None:
        self._progress.phase("starting Ray" if self._config.job.ray_address is None else "joining the Ray cluster")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._config.job.ray_address is None:
            prepare_environment()
        import ray

        self._ray_imported = True
        self._connect()
        self._progress.phase("starting the rollout worker and the trainer")
        with plain_errors():
            self._placement.reserve()
            self._trainers = self._placement.trainers(self._resume)
            if self._config.debug.replays:
                self._replay = ReplayRole(self._config)
            elif not self._config.takes_turns:
                self._rollout = self._placement.rollout(self._trainers, self._resume)
            started = [trainer.ready.remote() for trainer in self._trainers]
            if self._config.takes_turns:  # one after the other: an engine plans with the memory that it finds free
                ray.get(started)
                self._turns.before_engine()
                self._rollout = self._placement.rollout(self._trainers, self._resume)
            if self._rollout is not None:
                started.append(self._rollout.start.remote())
            reports = ray.get(started)[: len(self._trainers)]
            if reports:
                from train.megatron.weights.loading import what_ranks_read

                self._progress.note(what_ranks_read(reports))
            self._connect_weights()
            self._turns.before_first_update()
            self._hand_over()
            if self._released is not None:
                self._released.end(self._trainers, self._rollout)  # they begin from the same again
            self._turns.to_rollout()
        spare_from_collection()

    def step(self, rollout_id: int) -> StepOutput:
        with plain_errors():
            return self._step(rollout_id)

    def _step(self, rollout_id: int) -> StepOutput:
        import ray

        batch, output = self._roll_out(rollout_id)
        if not self._config.trainer_ranks or output.ended:
            return output
        if batch is None:
            return output.with_metrics({"train/optimizer_steps": 0.0})
        self._turns.to_trainer()
        made = self._remake_trainers()
        started = time.perf_counter()
        # Every rank reports the global values, so one report is the run's.
        metrics: dict[str, float] = ray.get([trainer.train.remote(batch, rollout_id) for trainer in self._trainers])[0]
        trained = time.perf_counter()
        if self._rollout is not None and self._config.rollout.rollout_mode != "sync":
            ray.get(self._rollout.settle.remote())
        settled = time.perf_counter()
        self._turns.to_update()
        updating = time.perf_counter()
        metrics |= self._hand_over()
        metrics["perf/rollout_time"] = output.metrics["perf/rollout_time"] + settled - trained
        metrics["perf/train_time"] = trained - started
        metrics["perf/update_weights_time"] = time.perf_counter() - updating
        released = self._release_trainers()  # before the engine takes the devices
        self._turns.to_rollout()
        return output.with_metrics(metrics | made | released | self._turns.metrics())

    def _roll_out(self, rollout_id: int) -> tuple[Any, StepOutput]:
        """A reference to the batch (None when nothing is left to train on), and what there is to say of the rollout."""
        import ray

        if self._replay is not None:
            batch, output = self._replay.rollout(rollout_id)
            return None if batch is None else ray.put(batch), output
        batch_ref, output_ref, has_batch = self._rollout.rollout.options(num_returns=3).remote(rollout_id)
        output = ray.get(output_ref)
        return batch_ref if ray.get(has_batch) else None, output

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        import ray

        with plain_errors():
            metrics: dict[str, float] = ray.get(self._rollout.evaluate.remote(rollout_id))
        return metrics

    def save_state(self, directory: Path) -> RunState:
        import ray

        with plain_errors():
            rollout: RolloutState = ray.get(self._rollout.save_state.remote(directory))
            if not self._trainers:
                assert self._released is not None
                trainer = self._released.copy_to(directory)
                return RunState(weight_version=self._version, trainer=trainer, rollout=rollout)
            with self._turns.trainer_in_between(TRAINER), plain_errors():
                saving = [trainer.save_state.remote(directory) for trainer in self._trainers]
                ray.wait(saving, num_returns=len(saving))  # an error of one must not leave the others at work
                trainer = ray.get(saving)[0]
        return RunState(weight_version=self._version, trainer=trainer, rollout=rollout)

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        import ray

        with plain_errors():
            rollout: RolloutState = ray.get(self._rollout.save_state.remote(work))
            manifest = draft(RunState(weight_version=self._version, trainer=UNWRITTEN, rollout=rollout))
            with self._turns.trainer_in_between(TRAINER):
                ray.get([trainer.begin_save.remote(work, manifest) for trainer in self._trainers])

    def saved(self, *, wait: bool) -> Published | None:
        import ray

        with plain_errors():
            outcome: Published | None = ray.get(self._trainers[0].saved.remote(wait=wait))
        return outcome

    def save_hf(self, directory: Path) -> None:
        import ray

        with plain_errors(), self._turns.trainer_in_between(WEIGHTS):
            if not self._trainers:
                self._turns.to_trainer()
            self._remake_trainers()
            ray.get([trainer.save_hf.remote(directory) for trainer in self._trainers])

    def trainers(self, call: str, *arguments: Any) -> list[Any]:
        import ray

        with plain_errors():
            done: list[Any] = ray.get([trainer.memory_call.remote(call, *arguments) for trainer in self._trainers])
        return done

    def rollout(self, call: str, *arguments: Any) -> Any:
        import ray

        with plain_errors():
            return ray.get(self._rollout.memory_call.remote(call, *arguments))

    def close(self) -> None:
        """End the actors in order, then the cluster if it was started here; bounded in time."""
        if not self._ray_imported:  # there is no cluster, and of an interrupted import only a broken half
            return
        import ray

        actors = [actor for actor in [self._rollout, *self._trainers] if actor is not None]
        self._rollout, self._trainers = None, []
        if self._released is not None:
            self._released.close()
        worker_died = False
        try:
            # An actor that is still being made answers only after that, and has nothing yet that it could lose.
            if actors and ray.is_initialized() and not self._start_interrupted:
                done, pending = ray.wait(
                    [actor.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_TIMEOUT
                )
                with plain_errors():
                    worker_died = any_died(done)
                if pending:
                    raise TimeoutError(f"{len(pending)} worker(s) did not close within {_CLOSE_TIMEOUT:g} s")
        finally:
            if ray.is_initialized():
                for actor in actors:
                    ray.kill(actor)
                self._placement.close()
            logs = self._run_dir / "ray_logs" if worker_died else None
            self._local_ray.stop(keep_logs=logs)
            self._placement.remove_stores()
            if logs is not None and logs.exists():
                self._progress.note(f"a worker process died; Ray's logs are in {logs}")

    def _remake_trainers(self) -> dict[str, float]:
        """Make the trainer from its last state, where it was given back. Metrics: the seconds that took."""
        import ray

        if self._trainers or not self._config.trainer_ranks:
            return {}
        assert self._released is not None
        started = time.perf_counter()
        self._trainers[:] = self._placement.trainers(self._released.latest or self._resume)
        try:
            ray.get([trainer.ready.remote() for trainer in self._trainers])
        except KeyboardInterrupt:
            self._start_interrupted = True  # what is being made is not asked to close
            raise
        if self._updater is not None:
            self._updater.open(self._updater.plan)
        return {"perf/remake_train_time": time.perf_counter() - started}

    def _release_trainers(self) -> dict[str, float]:
        """With ``--release-train``, keep the trainer's state and end its processes. Metrics: the seconds that took."""
        if self._released is None:
            return {}
        started = time.perf_counter()
        self._released.keep_state(self._trainers)
        self._released.end(self._trainers, self._rollout)
        return {"perf/release_train_time": time.perf_counter() - started}

    def _connect_weights(self) -> None:
        if self._rollout is None or not self._trainers:
            return
        from train.weight_sync.calls import ActorCalls
        from train.weight_sync.factory import create_weight_updater

        calls = ActorCalls(self._trainers, self._rollout)
        self._updater = create_weight_updater(self._config, calls, self._run_dir, self._progress.note)

    def _hand_over(self) -> dict[str, float]:
        if self._updater is None:
            return {}
        self._version += 1
        return self._updater.update(self._version)

    def _connect(self) -> None:
        address = self._config.job.ray_address
        common: dict[str, Any] = {"logging_level": "error", "log_to_driver": True}
        # Ray prepends the driver's working directory to its workers' module path. A folder of the user's that holds a
        # train.py would shadow ours there, so Ray is started from the run's own directory.
        with contextlib.chdir(self._run_dir):
            if address is None:
                devices = ray_node_options(self._accelerator, self._accelerator.device_count())
                self._local_ray.start({"num_cpus": 0, "num_gpus": 0, "include_dashboard": False} | devices | common)
            else:
                import ray

                ray.init(address=address, **common)
