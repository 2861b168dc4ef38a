"""Give back what the collectives' communicators hold, and rebuild them later, with torch.distributed as it is.

    init_process_group(accelerator, …, reloadable=True)   # and every new_group that inherits the backend
    release_process_groups(accelerator)                   # collective
    reload_process_groups(accelerator)                    # collective

A backend registered under a name of ours makes groups that pass their calls on to one inside. Whoever holds a group
(torch's registry, Megatron's parallel state, a device mesh) holds the outer one, which stays; a reload drops and
rebuilds the inner ones, each under a fresh prefix of its store and with exactly its own arguments. Groups made with
another backend, such as gloo side groups, are left alone.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel.comm.backend_strings import HOST_BACKEND, BackendSpec, declare_inner_backend, normalize_backend
from accel.comm.inner_groups import GroupArguments
from accel.comm.reloadable_group import ReloadableProcessGroup
from accel.contract import Accelerator
from accel.errors import AcceleratorError

PREFIX = "reloadable_"
MEETING_TIMEOUT = timedelta(minutes=10)


def register_reloadable_backend(accelerator: Accelerator, backend: str | None = None) -> str:
    """The name to give to ``init_process_group`` or ``new_group`` for reloadable groups of ``backend``.

    ``backend`` as everywhere ("nccl", "cpu:gloo,musa:mccl"; None: the accelerator's own). Registering again is fine.
    """
    spec = BackendSpec.parse(normalize_backend(backend, accelerator))
    if spec.bare is not None:
        name = PREFIX + spec.bare
        devices = dist.Backend.backend_capability.get(spec.bare, [accelerator.device_type])
        backends = {device: spec.bare for device in devices if device in ("cpu", accelerator.device_type)}
    else:
        name = PREFIX + "_".join(word for pair in spec.by_device for word in pair)
        backends = dict(spec.by_device)
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _Creator(name, backends), extended_api=True, devices=list(backends))
        declare_inner_backend(name, str(spec))
    return name


def release_process_groups(accelerator: Accelerator, timeout: timedelta = MEETING_TIMEOUT) -> list[str]:
    """Drop the communicators of every reloadable group; the names of those that were. Collective over all ranks.

    Waits for the device and for every rank first, since nothing may be in flight anywhere, and again afterwards: when
    it returns, no rank holds any. Until ``reload_process_groups`` a collective on such a group is an AcceleratorError.
    A rank that does not come within ``timeout`` is named in the RuntimeError.
    """
    host_group = prepare_reload()
    groups = [group for group in reloadable_groups() if not group.released]
    accelerator.synchronize()
    dist.monitored_barrier(host_group, timeout, wait_all_ranks=True)
    for group in reversed(groups):
        group.release()
    dist.monitored_barrier(host_group, timeout, wait_all_ranks=True)
    for group in groups:
        if group.rank() == 0:
            group.forget_meeting()
    return [group.group_name for group in groups]


def reload_process_groups(accelerator: Accelerator, timeout: timedelta = MEETING_TIMEOUT) -> list[str]:
    """Rebuild what was released; the names of those groups. Collective over all ranks.

    Every rank rebuilds its groups in the same order, that of their names, so that ranks which share several cannot wait
    for each other in a circle. When it returns, every rank is connected again.
    """
    host_group = prepare_reload()
    groups = [group for group in reloadable_groups() if group.released]
    dist.monitored_barrier(host_group, timeout, wait_all_ranks=True)
    word = _common_word(host_group)
    for group in groups:
        try:
            group.rebuild(word)
        except Exception as error:
            arguments = group.arguments
            raise AcceleratorError(
                f"process group {arguments.name} (rank {arguments.rank} of {arguments.size}, {group.name()}) could not "
                f"be rebuilt: {error}"
            ) from error
    accelerator.synchronize()
    dist.monitored_barrier(host_group, timeout, wait_all_ranks=True)
    return [group.group_name for group in groups]


def reloadable_groups() -> list[ReloadableProcessGroup]:
    """Those of this rank, in the order in which they are rebuilt. All members of a group know it by the same name."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, ReloadableProcessGroup)]
    return sorted(groups, key=lambda group: (len(group.group_name), group.group_name))


def _common_word(host_group: dist.ProcessGroup) -> str:
    """Of the first rank's making, never used before."""
    number = torch.tensor([secrets.randbits(62)])
    dist.broadcast(number, group_src=0, group=host_group)
    return f"{number.item():016x}"


class _Creator:
    """What torch calls for each new group of a backend of ours."""

    def __init__(self, kind: str, backends: dict[str, str]) -> None:
        self._kind = kind
        self._backends = backends

    def __call__(self, described: Any, options: Any) -> ReloadableProcessGroup:
        return ReloadableProcessGroup(
            GroupArguments(
                name=described.group_id,
                kind=self._kind,
                backends=self._backends,
                ranks=tuple(described.global_ranks_in_group),
                rank=described.group_rank,
                size=described.group_size,
                timeout=described.timeout,
                options=options,
                store=described.store,
            )
        )


def prepare_reload() -> dist.ProcessGroup:
    """The gloo group on which ranks meet while the others are gone, made by the first call. Collective then.

    AcceleratorError when the default process group is not reloadable.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, ReloadableProcessGroup):
        raise AcceleratorError(
            "the default process group is not reloadable: begin it with init_process_group(…, reloadable=True)"
        )
    if world.host_group is None:
        world.host_group = dist.new_group(backend=HOST_BACKEND, timeout=world.arguments.timeout)
    return world.host_group
