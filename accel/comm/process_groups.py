"""Process groups on the selected accelerator: begin, a host side group, barrier, end, begin again."""

from __future__ import annotations

import ipaddress
import os
import sys
from datetime import timedelta
from itertools import count
from urllib.parse import urlsplit

import torch.distributed as dist

from accel.comm.addresses import HOST_IFNAME_ENV
from accel.comm.backend_strings import HOST_BACKEND, device_backend, normalize_backend
from accel.comm.reload import prepare_reload, register_reloadable_backend
from accel.contract import Accelerator
from accel.errors import AcceleratorError

DEFAULT_TIMEOUT = timedelta(minutes=10)
LOOPBACK = ("127.0.0.1", "::1")
_generations = count()


def init_process_group(
    accelerator: Accelerator,
    *,
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    backend: str | None = None,
    local: bool | None = None,
    reloadable: bool = False,
) -> None:
    """Begin torch.distributed's default group with the accelerator's collectives.

    Give a ``store`` or an ``init_method`` (``file:///path``, ``tcp://host:port``, ``env://``). On one machine prefer a
    ``FileStore``: it opens no port. ``local`` says that all ranks are on this machine, and the collectives then listen
    on the loopback interface only; by default that is so for a FileStore, ``file://`` and loopback addresses. An
    interface that the environment names already is kept. Every rank must begin and end its groups equally often.
    With ``reloadable``, ``release_process_groups`` can give back what the groups hold (see ``accel/comm/reload.py``).
    """
    if dist.is_initialized():
        raise AcceleratorError("a process group is initialised already: call destroy_process_group first")
    if (store is None) == (init_method is None):
        raise AcceleratorError("init_process_group needs a store or an init_method, and not both")
    if not 0 <= rank < world_size:
        raise AcceleratorError(f"rank {rank} of a world of {world_size}: ranks are 0 to {world_size - 1}")
    if timeout <= timedelta(0):
        raise AcceleratorError(f"the time limit of a process group is {timeout}: give a positive one")
    if _is_local(store, init_method) if local is None else local:
        listen_on_loopback(accelerator)
    resolved = normalize_backend(backend, accelerator)
    if reloadable:
        resolved = register_reloadable_backend(accelerator, resolved)
    generation = next(_generations)
    dist.init_process_group(
        backend=resolved,
        # A store remembers its last group: re-initialising on the same one hangs unless its keys are fresh.
        store=None if store is None else dist.PrefixStore(f"accelrl/{generation}", store),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=accelerator.device() if _takes_device_id(accelerator, resolved) else None,
    )
    if reloadable:
        prepare_reload()


def new_host_group(ranks: list[int] | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """A gloo group beside the accelerator's, for objects, barriers and host tensors. Every rank must call it."""
    return dist.new_group(ranks=ranks, backend=HOST_BACKEND, timeout=timeout)


def barrier(accelerator: Accelerator, group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group, on this rank's own device."""
    if accelerator.capabilities.process_group_device_id:
        dist.barrier(group=group, device_ids=[accelerator.current_device()])
    else:
        dist.barrier(group=group)


def destroy_process_group() -> None:
    """End the default group and every subgroup, so that another can begin. Nothing to end is fine."""
    if dist.is_initialized():
        dist.destroy_process_group()


def tcp_address(host: str, port: int) -> str:
    """``tcp://host:port``, with the brackets that an IPv6 address needs."""
    if not 0 < port < 65536:
        raise AcceleratorError(f"port {port} of {host!r}: ports are 1 to 65535")
    bare = host.strip().removeprefix("[").removesuffix("]")
    if not bare:
        raise AcceleratorError("the host of a tcp:// address is empty")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def listen_on_loopback(accelerator: Accelerator) -> None:
    """Keep this process's collectives on this machine, unless the environment names an interface already."""
    for variable in filter(None, (HOST_IFNAME_ENV, accelerator.socket_ifname_env)):
        os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")


def _takes_device_id(accelerator: Accelerator, backend: str) -> bool:
    if not accelerator.capabilities.process_group_device_id:
        return False
    return device_backend(accelerator) in backend.replace(":", ",").split(",")


def _is_local(store: dist.Store | None, init_method: str | None) -> bool:
    if store is not None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return isinstance(store, (dist.FileStore, dist.HashStore))
    parts = urlsplit(init_method or "")
    if parts.scheme == "env":
        return _is_loopback(os.environ.get("MASTER_ADDR", ""))
    return parts.scheme == "file" or (parts.scheme == "tcp" and _is_loopback(parts.hostname or ""))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
