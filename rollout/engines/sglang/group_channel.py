"""New weights over a process group of the trainer's first rank and every server: they do not pass through here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from rollout.engines.errors import EngineError
from rollout.engines.sglang.group_orders import Orders
from rollout.engines.sglang.server import SGLangServer, first_failure

NEEDED = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weight_version",
)
_numbers = count()


@dataclass(frozen=True)
class _Announced:
    """What a server has to know of a bucket before it comes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> _Announced:
        return cls(
            list(tensors),
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            [list(tensor.shape) for tensor in tensors.values()],
        )


class GroupChannel:
    """Buckets come as tensors on the ``meta`` device, numbered from 0 in each update; the trainer broadcasts them.

    One group holds the trainer (rank 0) and all ranks of all servers, and is made anew at the next update after a
    server was started again. Such a server is given the current weights before that, over a group with the trainer
    alone, so it does not wait for the next update, nor do the others stand still for it.
    """

    def __init__(self, orders: Orders, backend: str) -> None:
        self._orders, self._backend = orders, backend
        self._servers: list[SGLangServer] = []
        self._group: str | None = None  # of all servers
        self._restarted: set[SGLangServer] = set()  # since the group was made
        self._coming: list[_Announced] = []
        self._current: tuple[list[_Announced], str] | None = None

    async def begin(self, servers: Sequence[SGLangServer]) -> None:
        self._servers, self._coming = list(servers), []
        if self._group is None or self._restarted:
            if self._group is not None:
                await self._leave(self._group, [one for one in servers if one not in self._restarted])
                self._group = None
            self._group = await self._join(servers)
            self._restarted = set()
        await first_failure(*(server.begin_update() for server in servers))

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._group is not None
        announced = _Announced.of(tensors)
        self._coming.append(announced)
        await self._deliver(self._group, self._servers, len(self._coming) - 1, announced)

    async def finish(self, version: str) -> None:
        await self._name(self._servers, version)
        self._current = (self._coming, version)

    async def reload(self, server: SGLangServer) -> bool:
        if self._current is None:
            return False
        buckets, version = self._current
        self._restarted.add(server)
        group = await self._join([server])
        await server.begin_update()
        for number, announced in enumerate(buckets):
            await self._deliver(group, [server], number, announced)
        await self._name([server], version)
        await self._leave(group, [server])
        return True

    def close(self) -> None:
        self._orders.close()

    async def _join(self, servers: Sequence[SGLangServer]) -> str:
        """A new group's name. Ranks are counted in the order of ``servers``."""
        for server in servers:
            server.check_has(NEEDED, "--weight-update-channel distributed")
        group = f"accelrl-{next(_numbers)}"
        size, offsets = 1, []
        for server in servers:
            offsets.append(size)
            size += server.tensor_parallel_size
        host, port = self._orders.host, self._orders.store_port
        joining = [
            server.join_group(group, host=host, port=port, offset=offset, size=size, backend=self._backend)
            for server, offset in zip(servers, offsets, strict=True)
        ]
        await first_failure(self._orders.join(group, size), *joining)
        return group

    async def _leave(self, group: str, servers: Sequence[SGLangServer]) -> None:
        await asyncio.gather(self._orders.leave(group), *(server.leave_group(group) for server in servers))

    async def _deliver(self, group: str, servers: Sequence[SGLangServer], number: int, bucket: _Announced) -> None:
        receiving = [
            server.update_from_group(group, names=bucket.names, dtypes=bucket.dtypes, shapes=bucket.shapes)
            for server in servers
        ]
        await first_failure(self._orders.send(group, number), *receiving)

    async def _name(self, servers: Sequence[SGLangServer], version: str) -> None:
        await first_failure(*(server.end_update() for server in servers))
        await first_failure(*(server.set_version(version) for server in servers))


async def open_group_channel(address: str, word: str, backend: str) -> GroupChannel:
    """Raises EngineError where the trainer is not at ``address``."""
    orders = Orders(address, word)
    try:
        await orders.open()
    except EngineError:
        orders.close()
        raise
    return GroupChannel(orders, backend)
