"""Who holds which device on which node. A plain class; ``accel/placement/ray_ledger.py`` puts one into a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from accel.errors import AcceleratorError


@dataclass(frozen=True)
class Lease:
    """Devices of one node, lent to one holder until it gives them back or dies."""

    lease_id: int
    resource: str
    node: str
    devices: tuple[str, ...]
    holder: str
    key: str = ""  # the request that it answers: asking again with the same key gives the same lease


class DeviceLedger:
    """Lends device ids of nodes. No id is ever lent twice at a time; the caller serialises calls."""

    def __init__(self) -> None:
        self._devices: dict[tuple[str, str], tuple[str, ...]] = {}
        self._leases: dict[int, Lease] = {}
        self._ids = count(1)

    def register_node(self, resource: str, node: str, devices: Sequence[str]) -> None:
        """Say which ids a node has. Saying the same again is fine; another list while some are lent is an error."""
        devices = tuple(devices)
        if len(set(devices)) != len(devices):
            raise AcceleratorError(f"node {node} lists a device of {resource} twice: {', '.join(devices)}")
        lent = self._lent(resource, node)
        known = self._devices.get((resource, node), devices)
        if (lent and known != devices) or not set(lent) <= set(devices):
            raise AcceleratorError(
                f"node {node} was registered with the {resource} devices {', '.join(known)}, of which "
                f"{', '.join(lent)} are "
                f"in use, and now with {', '.join(devices)}: start every job of a cluster under the same visible list"
            )
        self._devices[(resource, node)] = devices

    def lease(self, resource: str, node: str, amount: int, holder: str, key: str = "") -> Lease:
        """Lend the first ``amount`` free ids of a node; AcceleratorError with numbers and holders when too few.

        A request that comes again (same holder and key, "" excepted) is answered with what it was given already.
        """
        for earlier in self._leases.values():
            if key and (earlier.holder, earlier.key) == (holder, key):
                return earlier
        if amount < 1:
            raise AcceleratorError(f"a lease of {amount} devices: ask for 1 or more")
        if (resource, node) not in self._devices:
            raise AcceleratorError(f"node {node} has no registered {resource} devices")
        lent = self._lent(resource, node)
        free = [device for device in self._devices[(resource, node)] if device not in lent]
        if len(free) < amount:
            held = ", ".join(f"{device} by {lease.holder}" for device, lease in lent.items()) or "none held"
            raise AcceleratorError(
                f"node {node} has {len(free)} free {resource} devices of {len(self._devices[(resource, node)])} and "
                "the job "
                f"asks for {amount} ({held})"
            )
        lease = Lease(next(self._ids), resource, node, tuple(free[:amount]), holder, key)
        self._leases[lease.lease_id] = lease
        return lease

    def restore(self, lease: Lease) -> None:
        """Take up a lease that an earlier ledger gave; AcceleratorError when one of its devices is lent to another."""
        if self._leases.get(lease.lease_id) == lease:
            return
        lent = self._lent(lease.resource, lease.node)
        twice = [device for device in lease.devices if device in lent]
        if twice:
            raise AcceleratorError(
                f"{', '.join(twice)} on node {lease.node} is held by {lease.holder} and by {lent[twice[0]].holder}"
            )
        self._ids = count(max(lease.lease_id, *self._leases, 0) + 1)
        self._leases[lease.lease_id] = lease

    def release(self, lease_id: int) -> None:
        """Take one lease back; one that is back already is fine."""
        self._leases.pop(lease_id, None)

    def release_holder(self, holder: str) -> list[Lease]:
        """Take everything back that a holder has."""
        ended = self.held_by(holder)
        for lease in ended:
            self.release(lease.lease_id)
        return ended

    def held_by(self, holder: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.holder == holder]

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def _lent(self, resource: str, node: str) -> dict[str, Lease]:
        here = (lease for lease in self._leases.values() if (lease.resource, lease.node) == (resource, node))
        return {device: lease for lease in here for device in lease.devices}
