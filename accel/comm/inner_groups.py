"""The communicators inside a reloadable group: built from the group's own arguments, as torch does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from accel.errors import AcceleratorError

TAKES_OPTIONS = (dist.Backend.NCCL, dist.Backend.XCCL)  # built into torch, made of an options object


@dataclass(frozen=True)
class GroupArguments:
    """What one process group was created with; a rebuilt one gets exactly this again."""

    name: GroupName
    kind: str  # what the group answers when asked for its backend
    backends: Mapping[str, str]  # by device type
    ranks: tuple[int, ...]  # global ranks; empty for the default group
    rank: int  # in the group
    size: int
    timeout: timedelta
    options: Any  # pg_options, for the backend that takes such
    store: dist.Store  # of this group alone


def build_inner_group(arguments: GroupArguments, meeting: dist.Store, prefix: str) -> dist.ProcessGroup:
    """A plain process group that torch does not know of. Members ``meeting`` under keys with this ``prefix``, which has
    to be a fresh one, because a store remembers what it was told before.

    Blocks until all members are there where the backend connects at once (gloo does); raises what it raises then.
    """
    store = dist.PrefixStore(prefix, meeting)
    group = dist.ProcessGroup(store, arguments.rank, arguments.size)
    made: dict[str, Any] = {}
    for device, name in arguments.backends.items():
        if name not in made:
            made[name] = _make_backend(name, arguments, dist.PrefixStore(f"{device}/", store))
            if isinstance(made[name], dist.ProcessGroup):
                raise AcceleratorError(
                    f"the backend {name!r} of process group {arguments.name} is itself made of process groups, and "
                    "cannot be reloaded: name the one inside it"
                )
    kinds = dist.Backend.backend_type_map
    group._set_default_backend(kinds[next(iter(made))] if len(made) == 1 else _default_kind(arguments.backends))
    for device, name in arguments.backends.items():
        group._register_backend(torch.device(device), kinds[name], made[name])
    group._set_group_name(arguments.name)
    return group


def meeting_store(arguments: GroupArguments, word: str) -> dist.Store:
    """Where members meet again: the group's own store. If that is a file, which only grows, another one beside it for
    this time (``forget_file``). ``word``: of this time, the same on every rank."""
    root = arguments.store
    while isinstance(root, dist.PrefixStore):
        root = root.underlying_store
    if not isinstance(root, dist.FileStore):
        return arguments.store
    name = hashlib.sha256(arguments.name.encode()).hexdigest()[:16]
    beside = dist.FileStore(f"{root.path}.{word}-{name}", arguments.size)  # type: ignore[attr-defined]  # in no stub
    beside.set_timeout(root.timeout)  # type: ignore[attr-defined]
    return beside


def forget_file(meeting: dist.Store) -> None:
    """Remove a file of ``meeting_store``; torch does so with its last user, but not where two end at the same time."""
    if isinstance(meeting, dist.FileStore):
        Path(meeting.path).unlink(missing_ok=True)  # type: ignore[attr-defined]


def generation_prefix(generation: int) -> str:
    return f"reload/{generation}"


def current_timeout(group: dist.ProcessGroup, backends: Mapping[str, str], otherwise: timedelta) -> timedelta:
    """The time limit that the group has now, which may have been set after its creation."""
    for device, name in backends.items():
        if name == dist.Backend.GLOO or name in TAKES_OPTIONS:
            return group._get_backend(torch.device(device)).options._timeout
    return otherwise


def _make_backend(name: str, arguments: GroupArguments, store: dist.Store) -> Any:
    """As torch.distributed.new_group makes it, for what can be asked for by name."""
    if name == dist.Backend.GLOO:
        gloo = dist.ProcessGroupGloo(store, arguments.rank, arguments.size, timeout=arguments.timeout)
        gloo.options.global_ranks_in_group = list(arguments.ranks)
        gloo.options.group_name = arguments.name
        gloo._set_sequence_number_for_group()
        return gloo
    if name in TAKES_OPTIONS:
        return _make_with_options(name, arguments, store)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise AcceleratorError(f"the backend {name!r} cannot be reloaded: it is neither built in nor registered here")
    if not plugin.extended_api:
        return plugin.creator_fn(store, arguments.rank, arguments.size, arguments.timeout)
    described = dist.distributed_c10d._DistributedBackendOptions()
    described.store = store
    described.group_rank, described.group_size = arguments.rank, arguments.size
    described.timeout = arguments.timeout
    described.group_id = arguments.name
    described.global_ranks_in_group = list(arguments.ranks)
    return plugin.creator_fn(described, arguments.options)


def _make_with_options(name: str, arguments: GroupArguments, store: dist.Store) -> Any:
    made_by = getattr(dist, f"ProcessGroup{name.upper()}")
    options = arguments.options if arguments.options is not None else made_by.Options()
    options._timeout = arguments.timeout
    options.global_ranks_in_group = list(arguments.ranks)
    options.group_name = arguments.name
    backend = made_by(store, arguments.rank, arguments.size, options)
    if name == dist.Backend.NCCL:
        backend._set_sequence_number_for_group()
    return backend


def _default_kind(backends: Mapping[str, str]) -> Any:
    """Which backend of several answers where no tensor says so: the device's, as torch chooses."""
    kinds = [dist.Backend.backend_type_map[name] for device, name in backends.items() if device != "cpu"]
    return kinds[0]
