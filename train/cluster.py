"""``--launcher ray``: the roles as Ray actors, on a cluster started here or joined with ``--ray-address``."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.placement.ray_ledger import RayDeviceLeases, bundle_node
from accel.placement.requests import needs_device_lease, ray_node_options, ray_request, ray_worker_env
from observability import Progress
from rollout.engines.choice import choose_engine
from samples.errors import InputError, RunError
from train.checkpoint.background import Published
from train.checkpoint.manifest import UNWRITTEN, Checkpoint, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.released import SavedTrainer
from train.collection import spare_from_collection
from train.config.run import RunConfig
from train.local_ray import LocalRay, loopback_interface, prepare_environment
from train.loop import StepOutput
from train.replay.role import ReplayRole
from train.trainer_release import TrainerRelease
from train.turns import TRAINER, WEIGHTS, Turns

if TYPE_CHECKING:
    from train.batch import TrainBatch
    from train.megatron.weights.loading import LoadReport
    from train.profiling import ProfilePlan
    from train.weight_sync.updater import WeightUpdater

_PLACEMENT_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 20.0
_PLAIN = (InputError, AcceleratorError, RunError)  # errors whose words are for the person who started the run


class RolloutActor:
    """The rollout role in a process of its own."""

    def __init__(
        self,
        config: RunConfig,
        accelerator_spec: str,
        resume: Checkpoint | None,
        profile: ProfilePlan | None,
        engine_hosts: dict[str, Any],
    ) -> None:
        gc.disable()  # until the role has started: train.collection
        from train.devices import worker_accelerator
        from train.engine_hosts import RaySpawner
        from train.roles import RolloutRole

        self._failure: Exception | None = None
        spawner = RaySpawner(engine_hosts) if engine_hosts else None
        try:
            accelerator = worker_accelerator(config, accelerator_spec, needs_device=spawner is None)
            self._role = RolloutRole(config, accelerator, resume, profile, spawner)
        except _PLAIN as error:
            self._failure = error  # of what a constructor raises Ray keeps the text alone: `start` raises it

    def start(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._role.start()

    def rollout(self, rollout_id: int) -> tuple[TrainBatch | None, StepOutput, bool]:
        batch, output = self._role.rollout(rollout_id)
        return batch, output, batch is not None

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return self._role.evaluate(rollout_id)

    def settle(self) -> None:
        self._role.settle()

    def memory_call(self, call: str, *arguments: Any) -> Any:
        """What ``train.turns`` asks of this side."""
        return getattr(self._role, call)(*arguments)

    def save_state(self, directory: Path) -> RolloutState:
        return self._role.save_state(directory)

    def receiving(self, call: str, *arguments: Any) -> Any:
        """A call of this end of the weight channel."""
        return getattr(self._role.receiving, call)(*arguments)

    def close(self) -> None:
        if self._failure is None:
            self._role.close()


class TrainerActor:
    """One trainer rank in a process of its own."""

    def __init__(
        self,
        config: RunConfig,
        accelerator_spec: str,
        rank: int,
        store_path: str | None,
        resume: Checkpoint | SavedTrainer | None,
        profile: ProfilePlan | None,
    ) -> None:
        gc.disable()  # until the role has started: train.collection
        from train.devices import worker_accelerator
        from train.roles import TrainerRole

        self._failure: Exception | None = None
        try:
            self._accelerator = worker_accelerator(config, accelerator_spec)
            self._role = TrainerRole(
                config, self._accelerator, rank=rank, store_path=store_path, resume=resume, profile=profile
            )
        except _PLAIN as error:
            self._failure = error  # of what a constructor raises Ray keeps the text alone: `ready` raises it

    def ready(self) -> LoadReport:
        """What this rank read of the model's files."""
        if self._failure is not None:
            raise self._failure
        return self._role.weights_read

    def process(self) -> tuple[str, int]:
        """The node and the process that this rank lives in."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        return self._role.train(batch, rollout_id)

    def memory_call(self, call: str, *arguments: Any) -> Any:
        """What ``train.turns`` asks of this side."""
        return getattr(self._role, call)(*arguments)

    def device(self) -> str | None:
        """The device that this worker was given, as the vendor's variable lists it; None where there is no variable."""
        from accel.visibility import physical_device_id

        if self._accelerator.visible_devices_env is None:
            return None
        return physical_device_id(self._accelerator.current_device(), self._accelerator)

    def sending(self, call: str, *arguments: Any) -> Any:
        """A call of this end of the weight channel."""
        return getattr(self._role.sending, call)(*arguments)

    def save_state(self, directory: Path) -> TrainerState:
        return self._role.save_state(directory)

    def begin_save(self, work: Path, draft: Manifest) -> None:
        self._role.begin_save(work, draft)

    def saved(self, *, wait: bool) -> Published | None:
        return self._role.saved(wait=wait)

    def save_hf(self, directory: Path) -> None:
        self._role.save_hf(directory)

    def close(self) -> None:
        if self._failure is None:
            self._role.close()


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
        self._engine_hosts: dict[str, Any] = {}  # by the engine's name
        self._trainer_options: list[dict[str, Any]] = []  # of each rank's actor, whenever it is made
        self._released: TrainerRelease | None = None
        if config.job.release_train:
            self._released = TrainerRelease(run_dir / "released_trainer", _CLOSE_TIMEOUT)
        self._group: Any = None
        self._leases: RayDeviceLeases | None = None
        self._resume = resume
        self._profile = profile
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
        with _plain_errors():
            self._place()
            started = [trainer.ready.remote() for trainer in self._trainers]
            if self._config.takes_turns:  # one after the other: an engine plans with the memory that it finds free
                ray.get(started)
                self._turns.before_engine()
                self._place_rollout()
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
        with _plain_errors():
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

        with _plain_errors():
            metrics: dict[str, float] = ray.get(self._rollout.evaluate.remote(rollout_id))
        return metrics

    def save_state(self, directory: Path) -> RunState:
        import ray

        with _plain_errors():
            rollout: RolloutState = ray.get(self._rollout.save_state.remote(directory))
            if not self._trainers:
                assert self._released is not None
                trainer = self._released.copy_to(directory)
                return RunState(weight_version=self._version, trainer=trainer, rollout=rollout)
            with self._turns.trainer_in_between(TRAINER), _plain_errors():
                saving = [trainer.save_state.remote(directory) for trainer in self._trainers]
                ray.wait(saving, num_returns=len(saving))  # an error of one must not leave the others at work
                trainer = ray.get(saving)[0]
        return RunState(weight_version=self._version, trainer=trainer, rollout=rollout)

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        import ray

        with _plain_errors():
            rollout: RolloutState = ray.get(self._rollout.save_state.remote(work))
            manifest = draft(RunState(weight_version=self._version, trainer=UNWRITTEN, rollout=rollout))
            with self._turns.trainer_in_between(TRAINER):
                ray.get([trainer.begin_save.remote(work, manifest) for trainer in self._trainers])

    def saved(self, *, wait: bool) -> Published | None:
        import ray

        with _plain_errors():
            outcome: Published | None = ray.get(self._trainers[0].saved.remote(wait=wait))
        return outcome

    def save_hf(self, directory: Path) -> None:
        import ray

        with _plain_errors(), self._turns.trainer_in_between(WEIGHTS):
            if not self._trainers:
                self._turns.to_trainer()
            self._remake_trainers()
            ray.get([trainer.save_hf.remote(directory) for trainer in self._trainers])

    def trainers(self, call: str, *arguments: Any) -> list[Any]:
        import ray

        with _plain_errors():
            done: list[Any] = ray.get([trainer.memory_call.remote(call, *arguments) for trainer in self._trainers])
        return done

    def rollout(self, call: str, *arguments: Any) -> Any:
        import ray

        with _plain_errors():
            return ray.get(self._rollout.memory_call.remote(call, *arguments))

    def close(self) -> None:
        """End the actors in order, then the cluster if it was started here; bounded in time."""
        if not self._ray_imported:  # there is no cluster, and of an interrupted import only a broken half
            return
        import ray

        actors = [actor for actor in [self._rollout, *self._trainers] if actor is not None]
        hosts, self._engine_hosts = list(self._engine_hosts.values()), {}
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
                with _plain_errors():
                    worker_died = _died(done)
                if pending:
                    raise TimeoutError(f"{len(pending)} worker(s) did not close within {_CLOSE_TIMEOUT:g} s")
        finally:
            if ray.is_initialized():
                for actor in [*actors, *hosts]:  # an engine's processes end with its host
                    ray.kill(actor)
                if self._leases is not None:
                    self._leases.close()
                if self._group is not None:
                    ray.util.remove_placement_group(self._group)
            logs = self._run_dir / "ray_logs" if worker_died else None
            self._local_ray.stop(keep_logs=logs)
            if logs is not None and logs.exists():
                self._progress.note(f"a worker process died; Ray's logs are in {logs}")

    def _remake_trainers(self) -> dict[str, float]:
        """Make the trainer from its last state, where it was given back. Metrics: the seconds that took."""
        import ray

        if self._trainers or not self._config.trainer_ranks:
            return {}
        assert self._released is not None
        started = time.perf_counter()
        self._make_trainers(self._released.latest or self._resume)
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

    def _place(self) -> None:
        import ray
        from ray.util.placement_group import placement_group

        world = self._config.trainer_ranks
        rollout_devices = self._rollout_devices()
        resource = self._accelerator.ray_resource
        bundles = [{resource: 1.0} for _ in range(world)]
        engines = self._engines_of_their_own(rollout_devices)
        if engines:
            held = rollout_devices - sum(engines.values())  # placeholders: kept free of engines, and of other jobs
            bundles += [{resource: float(size)} for size in engines.values()] + [{resource: 1.0}] * held
        elif rollout_devices:
            bundles.append({resource: float(rollout_devices)})
        self._check_capacity(world + rollout_devices)
        if engines:
            self._check_largest_node(max(engines.values()))
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(_PLACEMENT_TIMEOUT):
            raise AcceleratorError(
                f"{world + rollout_devices} {self._accelerator.name} device(s) were not free on the Ray cluster within "
                f"{_PLACEMENT_TIMEOUT:g} s: {ray.available_resources().get(resource, 0):g} are free now"
            )
        if needs_device_lease(self._accelerator):
            self._leases = RayDeviceLeases(self._accelerator)
        job = self._config.job
        assert job.trainer_threads is not None
        assert job.rollout_threads is not None
        self._trainer_options = [
            ray_request(self._accelerator, 1) | self._actor_options(job.trainer_threads, bundle=rank)
            for rank in range(world)
        ]
        self._make_trainers(self._resume)
        if self._config.debug.replays:
            self._replay = ReplayRole(self._config)
            return
        for number, (name, size) in enumerate(engines.items()):
            self._engine_hosts[name] = self._engine_host(world + number, size)
        if not self._config.takes_turns:
            self._place_rollout()

    def _place_rollout(self) -> None:
        """The rollout worker: on devices of its own, or with ``--colocate`` on those that train."""
        import ray

        from accel import accelerator_spec

        threads = self._config.job.rollout_threads
        assert threads is not None
        # With engines elsewhere the worker needs no device, and lies where weights reach it through memory.
        devices = 0 if self._engine_hosts else self._rollout_devices()
        shared = None
        if self._config.offload.colocate:
            sharing = self._trainers[: self._config.rollout_devices]
            shared = [device for device in ray.get([trainer.device.remote() for trainer in sharing]) if device]
        options = ray_request(self._accelerator, devices)
        bundle = self._config.trainer_ranks if devices else 0
        options |= self._actor_options(threads, bundle=bundle, devices=devices, shared=shared)
        rollout = ray.remote(RolloutActor).options(**options)
        spec = accelerator_spec(self._accelerator)
        self._rollout = rollout.remote(self._config, spec, self._resume, self._profile, self._engine_hosts)

    def _engine_host(self, bundle: int, devices: int) -> Any:
        """An actor that starts one engine's processes on the node where ``bundle`` lies."""
        import ray

        from train.engine_hosts import EngineHostActor

        threads = self._config.job.rollout_threads
        assert threads is not None
        options = ray_request(self._accelerator, devices)
        options |= self._actor_options(threads, bundle=bundle, devices=devices)
        return ray.remote(EngineHostActor).options(**options).remote(self._config.job.ray_address is None)

    def _engines_of_their_own(self, rollout_devices: int) -> dict[str, int]:
        """SGLang engines that Ray places, with their devices; none where servers share the rollout worker's machine."""
        if not rollout_devices or choose_engine(self._config.rollout)[0] != "sglang":
            return {}
        from train.roles import rollout_settings

        return {engine.name: engine.num_devices for engine in rollout_settings(self._config).layout.engines}

    def _make_trainers(self, start: Checkpoint | SavedTrainer | None) -> None:
        """One actor a rank, where its options put it, beginning from ``start``; ``ready`` says when."""
        import ray

        from accel import accelerator_spec

        spec = accelerator_spec(self._accelerator)
        store = None
        if len(self._trainer_options) > 1:
            store_path = self._run_dir / "process_group.store"
            store_path.unlink(missing_ok=True)  # of a part of this run that has ended: ranks would meet its ghosts
            store = str(store_path)
        for rank, options in enumerate(self._trainer_options):
            actor = ray.remote(TrainerActor).options(**options)
            self._trainers.append(actor.remote(self._config, spec, rank, store, start, self._profile))

    def _actor_options(
        self, threads: int, *, bundle: int, devices: int = 1, shared: list[str] | None = None
    ) -> dict[str, Any]:
        """``shared``: devices that another worker was given, and this one uses too."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        leased: Sequence[str] | None = shared or None
        if self._leases is not None and devices:
            leased = self._leases.lease(bundle_node(self._group, bundle), devices).devices
        environment = ray_worker_env(self._accelerator, threads, leased) | {
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self._config.job.ray_address is None:
            # One machine: the collectives, the vendor's and gloo's beside them, stay on the loopback interface.
            for variable in {"GLOO_SOCKET_IFNAME", self._accelerator.socket_ifname_env or "GLOO_SOCKET_IFNAME"}:
                environment[variable] = loopback_interface()
        return {
            "num_cpus": 0,
            "runtime_env": {"env_vars": environment},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
        }

    def _rollout_devices(self) -> int:
        """Devices reserved for the embedded engine: none of its own where it can share one with a trainer."""
        if self._config.debug.replays:
            return 0
        if not self._config.trainer_ranks:
            return self._config.job.rollout_num_gpus or 1
        if self._config.offload.colocate:
            return 0
        asked = self._config.job.rollout_num_gpus
        if asked is not None:
            return asked
        return 1 if self._accelerator.capabilities.exclusive_devices else 0

    def _check_largest_node(self, per_engine: int) -> None:
        """An engine lies on one node."""
        import ray

        resource = self._accelerator.ray_resource
        largest = max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)
        if per_engine > largest:
            raise AcceleratorError(
                f"--rollout-num-gpus-per-engine {per_engine}: a run starts engines of one node each, and the largest "
                f"of the Ray cluster has {largest:g} {self._accelerator.name} device(s); start larger ones by hand and "
                "give them with --rollout-external-engine-addrs"
            )

    def _check_capacity(self, needed: int) -> None:
        import ray

        resource = self._accelerator.ray_resource
        there = ray.cluster_resources().get(resource, 0)
        if needed > there:
            variable = self._accelerator.visible_devices_env
            seen = f" ({variable}={os.environ.get(variable, 'unset')})" if variable else ""
            raise AcceleratorError(
                f"the job needs {needed} {self._accelerator.name} device(s) (--actor-num-nodes x "
                f"--actor-num-gpus-per-node = {self._config.trainer_ranks}, rollout {self._rollout_devices()}), but "
                f"the Ray cluster has {there:g}{seen}. {self._accelerator.more_devices_hint()}"
            )


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the worker's own error instead of Ray's wrapper around it."""
    import ray.exceptions

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, _PLAIN):
            raise cause.with_traceback(None) from None  # as it came: a subclass may be made of other arguments
        raise


def _died(closing: list[Any]) -> bool:
    """Whether an actor was dead already when it was asked to close. Raises what went wrong in one that was not."""
    import ray

    died = False
    for reference in closing:
        try:
            ray.get(reference)
        except ray.exceptions.RayActorError:
            died = True
    return died
