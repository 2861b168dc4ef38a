"""How the rollout worker has the trainer's first rank join a group with servers, and send over it.

The trainer listens; the rollout worker is the one that speaks, since it knows which servers there are and when one was
started again. A line of JSON is an order, a line of JSON its answer; one connection, one order at a time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal, TypedDict

from rollout.deploy.addresses import parse_address
from rollout.engines.errors import EngineError

_CONNECT_TIMEOUT = 30.0


class Order(TypedDict, total=False):
    """``hello`` asks for the store's port; ``join`` makes ``group`` of ``size`` ranks, the trainer being rank 0;
    ``send`` broadcasts the tensors of bucket ``bucket``, one by one; ``leave`` ends the group."""

    do: Literal["hello", "join", "send", "leave"]
    word: str
    group: str
    size: int
    bucket: int


class Orders:
    """``address`` and ``word`` are what the trainer's end offered. Nothing is connected yet."""

    def __init__(self, address: str, word: str) -> None:
        self.host, self._port = parse_address(address, "the trainer's address")
        self._word = word
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self.store_port = 0

    async def open(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                self._streams = await asyncio.open_connection(self.host, self._port)
                self.store_port = int((await self._ask({"do": "hello"}))["store_port"])
        except (OSError, TimeoutError) as error:
            raise EngineError(f"the trainer's rank 0 cannot be reached at {self.host}:{self._port}: {error}") from error

    async def join(self, group: str, size: int) -> None:
        """Returns when all ``size`` ranks have."""
        await self._ask({"do": "join", "group": group, "size": size})

    async def send(self, group: str, bucket: int) -> None:
        await self._ask({"do": "send", "group": group, "bucket": bucket})

    async def leave(self, group: str) -> None:
        await self._ask({"do": "leave", "group": group})

    def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()

    async def _ask(self, order: Order) -> dict[str, Any]:
        async with self._lock:
            if self._streams is None:
                raise EngineError("the connection to the trainer is closed")
            reader, writer = self._streams
            try:
                writer.write(json.dumps(order | {"word": self._word}).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for that of the next order
                raise
            except OSError as error:
                raise EngineError(f"the trainer has gone: {error}") from error
            if not line:
                raise EngineError("the trainer has gone: it closed the connection")
            answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"the trainer: {answer['error']}")
        return answer
