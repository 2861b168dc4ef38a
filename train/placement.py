"""Which devices of a Ray cluster each role gets, and the actors that are made there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.placement.ray_ledger import RayDeviceLeases, bundle_node
from accel.placement.requests import needs_device_lease, ray_request, ray_worker_env
from rollout.engines.choice import choose_engine
from train.actors import RolloutActor, TrainerActor
from train.checkpoint.manifest import Checkpoint
from train.checkpoint.released import SavedTrainer
from train.config.run import RunConfig
from train.local_ray import loopback_interface

if TYPE_CHECKING:
    from train.profiling import ProfilePlan

_PLACEMENT_TIMEOUT = 60.0
_STORE = "process_group.store"  # in the run directory: where trainer ranks find each other


class Placement:
    """One placement group of a run. ``reserve`` first; then ``trainers`` and ``rollout`` make actors, also anew.

    ``engine_hosts``: by the engine's name, the actors that start engines which Ray places.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator, run_dir: Path, profile: ProfilePlan | None) -> None:
        self._config = config
        self._accelerator = accelerator
        self._run_dir = run_dir
        self._profile = profile
        self.engine_hosts: dict[str, Any] = {}
        self._trainer_options: list[dict[str, Any]] = []  # of each rank's actor, whenever it is made
        self._group: Any = None
        self._leases: RayDeviceLeases | None = None

    def reserve(self) -> None:
        """Reserve devices for every role, and start the hosts of engines that Ray places.

        AcceleratorError when the cluster has too few devices, or they are not free in time.
        """
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
        for number, (name, size) in enumerate(engines.items()):
            self.engine_hosts[name] = self._engine_host(world + number, size)

    def trainers(self, start: Checkpoint | SavedTrainer | None) -> list[Any]:
        """One actor a rank, where its options put it, beginning from ``start``; ``ready`` says when."""
        import ray

        from accel import accelerator_spec

        spec = accelerator_spec(self._accelerator)
        store = None
        if len(self._trainer_options) > 1:
            self.remove_stores()  # of a part of this run that has ended: ranks would meet its ghosts
            store = str(self._run_dir / _STORE)
        return [
            ray.remote(TrainerActor).options(**options).remote(self._config, spec, rank, store, start, self._profile)
            for rank, options in enumerate(self._trainer_options)
        ]

    def rollout(self, trainers: Sequence[Any], resume: Checkpoint | None) -> Any:
        """The rollout worker: on devices of its own, or with ``--colocate`` on those of ``trainers``."""
        import ray

        from accel import accelerator_spec

        threads = self._config.job.rollout_threads
        assert threads is not None
        # With engines elsewhere the worker needs no device, and lies where weights reach it through memory.
        devices = 0 if self.engine_hosts else self._rollout_devices()
        shared = None
        if self._config.offload.colocate:
            sharing = trainers[: self._config.rollout_devices]
            shared = [device for device in ray.get([trainer.device.remote() for trainer in sharing]) if device]
        options = ray_request(self._accelerator, devices)
        bundle = self._config.trainer_ranks if devices else 0
        options |= self._actor_options(threads, bundle=bundle, devices=devices, shared=shared)
        rollout = ray.remote(RolloutActor).options(**options)
        spec = accelerator_spec(self._accelerator)
        return rollout.remote(self._config, spec, resume, self._profile, self.engine_hosts)

    def close(self) -> None:
        """End the engines' hosts, and with them the engines, and give the devices back."""
        import ray

        hosts, self.engine_hosts = list(self.engine_hosts.values()), {}
        for host in hosts:
            ray.kill(host)
        if self._leases is not None:
            self._leases.close()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def remove_stores(self) -> None:
        """Those of the trainers' groups, and those beside them of groups that were reloaded."""
        for path in self._run_dir.glob(f"{_STORE}*"):
            path.unlink(missing_ok=True)

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
