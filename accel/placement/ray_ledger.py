"""The device ledger in a Ray cluster: one named actor, and a holder actor for each driver whose death gives all back.

A custom resource gives a count and no index. So a driver leases ids from the ledger for the node that its placement
group chose, and starts the worker with them in the vendor's visible-devices variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from itertools import count
from typing import Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.masks import VisibleDevices
from accel.placement.ledger import DeviceLedger, Lease

LEDGER_NAME = "accelrl-device-ledger"
NAMESPACE = "accelrl"
HOLDER_PREFIX = "accelrl-lease-holder-"
_RETRY_AFTER = 0.2  # seconds
_CLOSE_TIMEOUT = 10.0  # seconds: the driver's end gives back what the ledger was too busy to take


class LeaseHolder:
    """Lives as long as its driver and remembers what the driver holds; Ray ends it with the driver.

    Where its process alone dies (out of memory, say) Ray starts it again, and the ledger tells it what it holds.
    """

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._ended = asyncio.Event()

    async def remember(self, leases: Sequence[Lease]) -> None:
        self._leases |= {lease.lease_id: lease for lease in leases}

    async def forget(self, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    async def leases(self) -> list[Lease]:
        return list(self._leases.values())

    async def until_dead(self) -> None:
        """Never returns: the ledger waits on it and hears of this process's end as an error."""
        await self._ended.wait()


class LedgerActor:
    """The ledger behind one asyncio loop. A restarted one asks the living holders what was lent.

    Only a holder that Ray has buried gives its devices back: its driver ended, or closed it. One that cannot be reached
    or is being started again still holds them.
    """

    def __init__(self) -> None:
        self._ledger = DeviceLedger()
        self._lock = asyncio.Lock()
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._recovered = False

    async def register_node(self, resource: str, node: str, devices: Sequence[str]) -> None:
        async with self._lock:
            await self._recover()
            self._ledger.register_node(resource, node, devices)

    async def lease(self, resource: str, node: str, amount: int, holder: str, key: str = "") -> Lease:
        """Lend, and tell the holder before the driver hears of it, so that no lease is ever known to nobody.

        ``key`` is the driver's name for this request, so that Ray's retry of the call does not lease twice.
        """
        async with self._lock:
            await self._recover()
            self._watch(holder)
            lease = self._ledger.lease(resource, node, amount, holder, key)
            try:
                await _ask_holder(holder, "remember", [lease])
            except BaseException:
                self._ledger.release(lease.lease_id)
                raise
            return lease

    async def release(self, leases: Sequence[Lease]) -> None:
        """Take leases back; those that are back already, or whose holder is gone, are fine."""
        async with self._lock:
            await self._recover()
            for lease in leases:
                self._ledger.release(lease.lease_id)
                with contextlib.suppress(HolderGone):
                    await _ask_holder(lease.holder, "forget", [lease.lease_id])

    async def release_holder(self, holder: str) -> None:
        """Take everything of a holder back."""
        async with self._lock:
            await self._recover()
            ended = self._ledger.release_holder(holder)
            with contextlib.suppress(HolderGone):
                await _ask_holder(holder, "forget", [lease.lease_id for lease in ended])

    async def leases(self) -> list[Lease]:
        async with self._lock:
            await self._recover()
            return self._ledger.leases()

    def _watch(self, holder: str) -> None:
        if holder not in self._watched:
            self._watched[holder] = asyncio.create_task(self._release_when_dead(holder))

    async def _release_when_dead(self, holder: str) -> None:
        while True:
            with contextlib.suppress(HolderGone):
                await _ask_holder(holder, "until_dead", tries=1)
            async with self._lock:
                if not _is_buried(holder):
                    with contextlib.suppress(HolderGone):
                        await _ask_holder(holder, "remember", self._ledger.held_by(holder))
                    continue
                self._ledger.release_holder(holder)
                self._watched.pop(holder, None)
                return

    async def _recover(self) -> None:
        """Once; a part of it that fails is done again at the next call, and what is known already stays as it is."""
        import ray

        if self._recovered:
            return
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != NAMESPACE or not entry["name"].startswith(HOLDER_PREFIX):
                continue
            try:
                leases = await _ask_holder(entry["name"], "leases")
            except HolderGone:
                continue  # ended since it was listed: what it held is free
            for lease in leases:
                self._ledger.restore(lease)
            self._watch(entry["name"])
        self._recovered = True


class HolderGone(AcceleratorError):
    """A holder that Ray has buried, with the driver that made it."""


def _is_buried(holder: str) -> bool:
    """Whether Ray has given up an actor for good: it keeps the name of one that it starts again."""
    import ray

    try:
        ray.get_actor(holder, namespace=NAMESPACE)
    except ValueError:
        return True
    return False


async def _ask_holder(holder: str, method: str, *arguments: Any, tries: int | None = None) -> Any:
    """A holder's answer, however long its process takes to be there again; HolderGone when it is buried.

    With ``tries`` a process that dies that often while it is asked ends the call as well: None is returned.
    """
    import ray
    import ray.exceptions

    for attempt in count(1):
        try:
            actor = ray.get_actor(holder, namespace=NAMESPACE)
        except ValueError:
            raise HolderGone(f"the driver behind {holder} has ended: it holds no devices any more") from None
        try:
            return await getattr(actor, method).remote(*arguments)
        except ray.exceptions.RayActorError:
            await asyncio.sleep(_RETRY_AFTER)
        if tries is not None and attempt >= tries:
            return None
    return None


class RayDeviceLeases:
    """A driver's side: leases devices of one accelerator on the nodes of the cluster that Ray is connected to.

    ``close`` (or the driver's death) gives everything back. Ray is initialised by the caller.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        import ray

        self._accelerator = accelerator
        self._name = f"{HOLDER_PREFIX}{ray.get_runtime_context().get_job_id()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._holder = (
            ray.remote(LeaseHolder).options(name=self._name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1).remote()
        )
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

        resource = self._accelerator.ray_resource
        if node_id not in self._nodes:
            devices = node_devices(self._accelerator, node_id)
            self._ask(self._ledger.register_node.remote(resource, node_id, devices))
            self._nodes.add(node_id)
        key = os.urandom(8).hex()
        return self._ask(self._ledger.lease.remote(resource, node_id, amount, self._name, key))

    def release(self, lease: Lease) -> None:
        """Give one lease back, after the worker that used it has ended."""
        self._ask(self._ledger.release.remote([lease]))

    def close(self) -> None:
        """Give everything back. Where the ledger or the holder is gone already there is nothing to give back to."""
        import ray
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(self._ledger.release_holder.remote(self._name), timeout=_CLOSE_TIMEOUT)
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
