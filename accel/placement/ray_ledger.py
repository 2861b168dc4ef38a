"""The device ledger in a Ray cluster: one named actor, and a holder actor for each driver whose death gives all back.

A custom resource gives a count and no index. So a driver leases ids from the ledger for the node that its placement
group chose, and starts the worker with them in the vendor's visible-devices variable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.masks import VisibleDevices
from accel.placement.ledger import DeviceLedger, Lease

LEDGER_NAME = "accelrl-device-ledger"
NAMESPACE = "accelrl"
HOLDER_PREFIX = "accelrl-lease-holder-"


class LeaseHolder:
    """Lives as long as its driver and remembers what the driver holds; Ray ends it with the driver."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._ended = asyncio.Event()

    async def remember(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease

    async def forget(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)

    async def leases(self) -> list[Lease]:
        return list(self._leases.values())

    async def until_dead(self) -> None:
        """Never returns: the ledger waits on it and hears of this actor's end as an error."""
        await self._ended.wait()


class LedgerActor:
    """The ledger behind one asyncio loop. A restarted one asks the living holders what was lent."""

    def __init__(self) -> None:
        self._ledger = DeviceLedger()
        self._lock = asyncio.Lock()
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._recovered = False

    async def register_node(self, resource: str, node: str, devices: Sequence[str]) -> None:
        async with self._lock:
            await self._recover()
            self._ledger.register_node(resource, node, devices)

    async def lease(self, resource: str, node: str, amount: int, holder: str) -> Lease:
        """Lend, and tell the holder before the driver hears of it, so that no lease is ever known to nobody."""
        async with self._lock:
            await self._recover()
            actor = self._watch(holder)
            lease = self._ledger.lease(resource, node, amount, holder)
            try:
                await actor.remember.remote(lease)
            except BaseException:
                self._ledger.release(lease.lease_id)
                raise
            return lease

    async def release(self, lease: Lease) -> None:
        async with self._lock:
            await self._recover()
            self._ledger.release(lease.lease_id)

    async def leases(self) -> list[Lease]:
        async with self._lock:
            await self._recover()
            return self._ledger.leases()

    def _watch(self, holder: str) -> Any:
        import ray

        actor = ray.get_actor(holder, namespace=NAMESPACE)
        if holder not in self._watched:
            self._watched[holder] = asyncio.create_task(self._release_when_dead(holder, actor))
        return actor

    async def _release_when_dead(self, holder: str, actor: Any) -> None:
        import ray.exceptions

        try:
            await actor.until_dead.remote()
        except ray.exceptions.RayActorError:
            async with self._lock:
                self._ledger.release_holder(holder)
                self._watched.pop(holder, None)

    async def _recover(self) -> None:
        import ray
        import ray.exceptions

        if self._recovered:
            return
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != NAMESPACE or not entry["name"].startswith(HOLDER_PREFIX):
                continue
            try:
                leases = await self._watch(entry["name"]).leases.remote()
            except (ValueError, ray.exceptions.RayActorError):
                continue  # ended since it was listed: what it held is free
            for lease in leases:
                self._ledger.restore(lease)
        self._recovered = True


class RayDeviceLeases:
    """A driver's side: leases devices of one accelerator on the nodes of the cluster that Ray is connected to.

    ``close`` (or the driver's death) gives everything back. Ray is initialised by the caller.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        import ray

        self._accelerator = accelerator
        self._name = f"{HOLDER_PREFIX}{ray.get_runtime_context().get_job_id()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._holder = ray.remote(LeaseHolder).options(name=self._name, namespace=NAMESPACE, num_cpus=0).remote()
        self._ledger = (
            ray.remote(LedgerActor)
            .options(
                name=LEDGER_NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
            )
            .remote()
        )
        ray.get(self._holder.leases.remote())
        self._nodes: set[str] = set()

    def lease(self, node_id: str, amount: int) -> Lease:
        """Devices of one node; AcceleratorError with both numbers and the holders when it has too few free ones."""

        if node_id not in self._nodes:
            devices = node_devices(self._accelerator, node_id)
            self._ask(self._ledger.register_node.remote(self._accelerator.ray_resource, node_id, devices))
            self._nodes.add(node_id)
        return self._ask(self._ledger.lease.remote(self._accelerator.ray_resource, node_id, amount, self._name))

    def release(self, lease: Lease) -> None:
        """Give one lease back, after the worker that used it has ended."""
        import ray

        ray.get([self._ledger.release.remote(lease), self._holder.forget.remote(lease.lease_id)])

    def close(self) -> None:
        """Give everything back."""
        import ray

        for lease in ray.get(self._holder.leases.remote()):
            self.release(lease)
        ray.kill(self._holder)

    def _ask(self, reference: Any) -> Any:
        import ray
        import ray.exceptions

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AcceleratorError):
                raise error.cause from None
            raise


def bundle_node(group: Any, bundle: int) -> str:
    """The node that a ready placement group chose for one of its bundles."""
    from ray.util import placement_group_table

    return placement_group_table(group)["bundles_to_node_id"][bundle]


def node_devices(accelerator: Accelerator, node_id: str) -> tuple[str, ...]:
    """Physical ids that a node offers: its visible list, or 0 to the count of the resource it was started with."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if node_id not in nodes:
        raise AcceleratorError(f"the cluster has no living node {node_id}")
    amount = int(nodes[node_id].get(accelerator.ray_resource, 0))
    variable = accelerator.visible_devices_env
    if variable is None:
        raise AcceleratorError(f"{accelerator.name!r} has no visible-devices variable: its devices cannot be leased")
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    value = ray.get(ray.remote(_read_environment).options(num_cpus=0, scheduling_strategy=there).remote(variable))
    ids = VisibleDevices.parse(variable, value).ids
    if ids is None:
        return tuple(str(number) for number in range(amount))
    if len(ids) != amount:
        raise AcceleratorError(
            f"node {node_id} was started with {amount} {accelerator.ray_resource} and {variable}={value!r}, which "
            "lists "
            f"{len(ids)}: make them agree"
        )
    return ids


def _read_environment(variable: str) -> str | None:
    return os.environ.get(variable)
