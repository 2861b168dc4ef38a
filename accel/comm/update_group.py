"""A process group between processes that are in no world together, such as a trainer's rank and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel.comm.addresses import listening_on, listening_socket
from accel.comm.backend_strings import weight_update_backend
from accel.comm.process_groups import listen_on_loopback
from accel.contract import Accelerator
from accel.errors import AcceleratorError


class UpdateGroup:
    """Ranks 0 to ``size`` - 1 of ``accelerator.weight_update_backend``, beside any default group, or without one.

    Every rank makes it at the same time with its own end of one ``store``. ``address``: this rank's, at which the
    others reach it; None keeps the collectives on the loopback interface. A broadcast that takes longer than
    ``timeout``, or whose peer has gone, is an AcceleratorError.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        rank: int,
        size: int,
        store: dist.Store,
        name: str,
        timeout: timedelta,
        address: str | None,
    ) -> None:
        if address is None:
            listen_on_loopback(accelerator)
        self._timeout = timeout
        self._group: dist.ProcessGroup | None
        with nullcontext() if address is None else listening_on(accelerator, address):
            # What new_group calls inside; new_group itself needs a default group that all ranks are in.
            self._group, _ = distributed_c10d._new_process_group_helper(
                size,
                rank,
                [],
                dist.Backend(weight_update_backend(accelerator)),
                dist.PrefixStore(name, store),
                group_name=distributed_c10d.GroupName(name),
                timeout=timeout,
            )
        distributed_c10d._world.pg_group_ranks[self._group] = {each: each for each in range(size)}

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor``, on the accelerator's device, with that of rank ``source``."""
        self.broadcast_each([tensor], source)

    def broadcast_each(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """One broadcast a tensor, all under way at once."""
        if self._group is None:
            raise AcceleratorError("the update group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        try:
            for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
                work.wait()
        except RuntimeError as error:
            raise AcceleratorError(
                f"weights could not be broadcast within {self._timeout.total_seconds():g} s, or the other side has "
                f"gone: {error}"
            ) from error

    def close(self) -> None:
        """Without waiting for the other ranks; harmless twice."""
        group, self._group = self._group, None
        if group is not None and distributed_c10d._world.pg_map.get(group) is not None:
            dist.destroy_process_group(group)


def open_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """A store of this process through which ranks elsewhere find each other, at a free port of ``host`` alone."""
    with listening_socket(host) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),  # the store's from here on
        )
