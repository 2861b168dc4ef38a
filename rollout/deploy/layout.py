"""Which engine of which group gets which devices: pure planning, nothing is started or asked here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.deploy.addresses import parse_address
from rollout.deploy.description import Description, GroupSpec, Machines, ModelSpec, WorkerType
from rollout.deploy.overrides import checked_overrides
from samples.errors import InputError


@dataclass(frozen=True)
class Share:
    """The part of an engine on one node: local indices of its devices there."""

    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class EnginePlan:
    """One engine. ``shares`` has one entry for each node that it spans; the first holds its rank 0."""

    model: str
    model_path: str | None
    group: int  # index among the model's groups
    index: int  # index among the group's engines
    worker_type: WorkerType
    shares: tuple[Share, ...]
    shares_with_trainer: bool
    updates_weights: bool
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``actor-0-regular-1``: model, group, type, engine; unique in a layout, and fit for a file's name."""
        return f"{self.model}-{self.group}-{self.worker_type.value}-{self.index}"

    @property
    def num_devices(self) -> int:
        return sum(len(share.devices) for share in self.shares)


@dataclass(frozen=True)
class GroupPlan:
    """``first`` to ``first + size - 1`` are its device slots, counted over all nodes."""

    model: str
    index: int
    worker_type: WorkerType
    first: int
    size: int
    engines: tuple[EnginePlan, ...]


@dataclass(frozen=True)
class ModelPlan:
    name: str
    model_path: str | None
    updates_weights: bool
    groups: tuple[GroupPlan, ...]
    external_engine_addrs: tuple[str, ...]
    num_gpus_per_engine: int = 1  # of groups that do not say, and of external servers

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are apart, which its router has to know."""
        return any(group.worker_type is WorkerType.PREFILL for group in self.groups)

    @property
    def engines(self) -> list[EnginePlan]:
        return [engine for group in self.groups for engine in group.engines]


@dataclass(frozen=True)
class Layout:
    models: tuple[ModelPlan, ...]
    machines: Machines
    slots: int  # devices of the rollout
    first: int  # the rollout's first device, counted over all nodes

    @property
    def engines(self) -> list[EnginePlan]:
        return [engine for model in self.models for engine in model.engines]

    @property
    def nodes(self) -> int:
        """Nodes that hold the rollout's devices."""
        if not self.slots:
            return 0
        per_node = self.machines.num_gpus_per_node
        return (self.first + self.slots - 1) // per_node - self.first // per_node + 1


def describe_flags(
    *,
    rollout_num_gpus: int,
    num_gpus_per_engine: int = 1,
    prefill_num_servers: int = 0,
    external_engine_addrs: Sequence[str] = (),
    machines: Machines | None = None,
) -> Description:
    """The description that flags stand for: one model with regular engines, or with prefill and decode apart."""
    machines = (machines or Machines()).model_copy(update={"rollout_num_gpus": rollout_num_gpus})
    if external_engine_addrs and rollout_num_gpus:
        raise InputError(
            f"--rollout-num-gpus {rollout_num_gpus} with --rollout-external-engine-addrs: external servers bring their "
            "own devices; use --rollout-num-gpus 0"
        )
    groups = []
    if prefill_num_servers:
        prefill = prefill_num_servers * num_gpus_per_engine
        if prefill >= rollout_num_gpus:
            raise InputError(
                f"--prefill-num-servers {prefill_num_servers}: group prefill needs {prefill} devices, "
                f"{rollout_num_gpus} are available (--rollout-num-gpus), and at least one engine has to decode; use at "
                f"most {max(0, rollout_num_gpus // num_gpus_per_engine - 1)}"
            )
        groups.append(GroupSpec(worker_type=WorkerType.PREFILL, num_gpus=prefill))
        groups.append(GroupSpec(worker_type=WorkerType.DECODE, num_gpus=rollout_num_gpus - prefill))
    elif rollout_num_gpus:
        groups.append(GroupSpec(num_gpus=rollout_num_gpus))
    model = ModelSpec(
        name="actor",
        num_gpus_per_engine=num_gpus_per_engine,
        server_groups=tuple(groups),
        external_engine_addrs=tuple(external_engine_addrs),
    )
    return Description(models=(model,), machines=machines)


def plan_layout(description: Description) -> Layout:
    """Give every engine its devices, in the order in which groups are written. InputError lists all that does not fit.

    Devices are counted over all nodes, node by node. The rollout's come after those that train, or with ``colocate``
    begin with them. A group that does not say has engines of its model's size, and those have one device.
    """
    machines = description.machines
    first = 0 if machines.colocate else machines.actor_num_gpus
    problems = [*_model_problems(description), *_machine_problems(machines)]
    cursor, models = first, []
    for model in description.models:
        groups = []
        for index, group in enumerate(model.server_groups):
            problems += _group_problems(model, index, group)
            size = _engine_size(model, group)
            engines: tuple[EnginePlan, ...] = ()
            if group.worker_type is not WorkerType.PLACEHOLDER and group.num_gpus % size == 0:
                starts = range(cursor, cursor + group.num_gpus, size)
                problems += _placement_problems(model, index, group, starts, size, machines)
                engines = tuple(_engine(model, index, group, n, at, size, machines) for n, at in enumerate(starts))
            groups.append(GroupPlan(model.name, index, group.worker_type, cursor, group.num_gpus, engines))
            cursor += group.num_gpus
        path, updates, per_engine = model.model_path, model.receives_updates, model.num_gpus_per_engine or 1
        models.append(ModelPlan(model.name, path, updates, tuple(groups), model.external_engine_addrs, per_engine))
    needed = cursor - first
    problems += _total_problems(description, needed)
    if problems:
        raise InputError("\n".join(problems))
    return Layout(tuple(models), machines, needed, first)


def _engine_size(model: ModelSpec, group: GroupSpec) -> int:
    return group.num_gpus_per_engine or model.num_gpus_per_engine or 1


def _label(model: ModelSpec, index: int, group: GroupSpec) -> str:
    return f"model {model.name}, group {index} ({group.worker_type.value})"


def _shares(start: int, size: int, per_node: int) -> tuple[Share, ...]:
    devices: dict[int, list[int]] = {}
    for slot in range(start, start + size):
        devices.setdefault(slot // per_node, []).append(slot % per_node)
    return tuple(Share(node, tuple(local)) for node, local in devices.items())


def _engine(
    model: ModelSpec, index: int, group: GroupSpec, number: int, start: int, size: int, machines: Machines
) -> EnginePlan:
    return EnginePlan(
        model=model.name,
        model_path=model.model_path,
        group=index,
        index=number,
        worker_type=group.worker_type,
        shares=_shares(start, size, machines.num_gpus_per_node),
        shares_with_trainer=machines.colocate and start < machines.actor_num_gpus,
        updates_weights=model.receives_updates and group.worker_type is not WorkerType.ENCODER,
        overrides=group.overrides,
    )


def _model_problems(description: Description) -> Iterator[str]:
    seen: set[str] = set()
    for model in description.models:
        if model.name in seen:
            yield f"model {model.name}: the name stands twice; each model has a router of its own under its name"
        seen.add(model.name)
        if any(not (letter.isalnum() or letter in "._-") for letter in model.name):
            yield f"model {model.name!r}: a name is of letters, digits, '.', '_' and '-': it names log files too"
        types = {group.worker_type for group in model.server_groups}
        if types & {WorkerType.PREFILL, WorkerType.DECODE} and WorkerType.REGULAR in types:
            yield f"model {model.name}: regular groups and prefill/decode groups cannot stand behind one router"
        for one, other in ((WorkerType.PREFILL, WorkerType.DECODE), (WorkerType.DECODE, WorkerType.PREFILL)):
            if one in types and other not in types:
                yield f"model {model.name}: has a {one.value} group and no {other.value} group: it needs at least one"
        if WorkerType.ENCODER in types and types <= {WorkerType.ENCODER, WorkerType.PLACEHOLDER}:
            yield f"model {model.name}: has an encoder group and none that generates text: it needs at least one"
        for address in model.external_engine_addrs:
            try:
                parse_address(address, f"model {model.name}: external_engine_addrs")
            except InputError as error:
                yield str(error)
        if not types - {WorkerType.PLACEHOLDER} and not model.external_engine_addrs:
            yield f"model {model.name}: has no group with engines and no external_engine_addrs: nothing would answer"
    if not any(model.receives_updates for model in description.models):
        yield "no model receives weight updates: set update_weights = true for the one that is trained"


def _machine_problems(machines: Machines) -> Iterator[str]:
    if machines.colocate and not machines.actor_num_gpus:
        yield "colocate: there are no devices that train to share; give actor_num_gpus"


def _group_problems(model: ModelSpec, index: int, group: GroupSpec) -> Iterator[str]:
    label, size = _label(model, index, group), _engine_size(model, group)
    if group.worker_type is WorkerType.PLACEHOLDER:
        if group.overrides or group.num_gpus_per_engine is not None:
            yield f"{label}: a placeholder starts no engines; leave overrides and num_gpus_per_engine out"
        return
    try:
        checked_overrides(group.overrides, f"{label}: overrides")
    except InputError as error:
        yield str(error)
    if group.num_gpus % size:
        below = group.num_gpus // size * size
        yield (
            f"{label}: engines of {size} need a multiple of {size} devices, {group.num_gpus} are available to the "
            f"group; use num_gpus = {' or '.join(str(n) for n in (below, below + size) if n)}"
        )


def _placement_problems(
    model: ModelSpec, index: int, group: GroupSpec, starts: range, size: int, machines: Machines
) -> Iterator[str]:
    """Of an engine that lies badly on the nodes; only the group's first such engine is told."""
    label, per_node = _label(model, index, group), machines.num_gpus_per_node
    if size > per_node and size % per_node:
        yield (
            f"{label}: an engine of {size} devices spans nodes of {per_node} unevenly: needed are whole nodes, "
            f"available are {per_node} a node; use num_gpus_per_engine = {size // per_node * per_node} or "
            f"{-(-size // per_node) * per_node}"
        )
        return
    for number, start in enumerate(starts):
        left = per_node - start % per_node
        if left < size and (size <= per_node or left < per_node):
            yield (
                f"{label}: engine {number} needs {min(size, per_node)} devices of one node, {left} are available on "
                f"node {start // per_node} (of {per_node}); put a placeholder group of {left} before it, or reorder "
                "groups"
            )
            return
    actor = machines.actor_num_gpus
    for number, start in enumerate(starts):
        if machines.colocate and start < actor < start + size:
            yield (
                f"{label}: engine {number} needs {size} devices that all train or none, available are {actor - start} "
                f"that train and {start + size - actor} that do not; put a placeholder group of {actor - start} before "
                "it, or use another num_gpus_per_engine"
            )
            return


def _total_problems(description: Description, needed: int) -> Iterator[str]:
    available = description.machines.rollout_num_gpus
    if available is None or available == needed:
        return
    groups = "; ".join(
        f"{_label(model, index, group)} {group.num_gpus}"
        for model in description.models
        for index, group in enumerate(model.server_groups)
    )
    if needed > available:
        yield f"needed are {needed} devices ({groups}), available are {available} (rollout_num_gpus)"
    else:
        yield (
            f"needed are {needed} devices ({groups or 'none'}), available are {available} (rollout_num_gpus): "
            f"{available - needed} would stand idle; add a placeholder group of {available - needed} if that is meant"
        )
