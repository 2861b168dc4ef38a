"""``--weight-update-channel distributed`` to SGLang servers: the trainer's first rank broadcasts to all their ranks.

The rollout worker says with whom to make a group and when to send (``rollout.engines.sglang.group_orders``); it never
sees the weights themselves.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from accel.comm.update_group import UpdateGroup, open_store
from accel.contract import Accelerator
from accel.errors import AcceleratorError
from rollout.deploy.addresses import base_url
from rollout.engines.sglang.group_orders import Order
from samples.errors import RunError
from train.weight_sync.buckets import Bucket, PackedTensor, pack
from train.weight_sync.distributed import node_address
from train.weight_sync.leftovers import new_name
from train.weight_sync.plan import Offer, Summary, UpdatePlan
from train.weight_sync.sending import Sender, Weights

_LIVE = 2  # buckets of which the device's copy is there: the one that is sent, and the one that is packed meanwhile
_CLOSE_TIMEOUT = 5.0
_WORD_TIMEOUT = 10.0  # seconds in which whoever connects has to say the word
_LONGEST_ORDER = 4096  # bytes


class ServerGroupSender(Sender):
    """Packs buckets on the device, and does what the rollout worker orders on threads of its own, a connection each:
    a stranger who connects, such as a scan of ports, ends nothing and is waited for by nobody.

    With ``plan.keeps_weights`` each bucket is copied to host memory too, until the next update: a server that is
    started again gets it from there, whatever the trainer does to its weights meanwhile.
    """

    def __init__(self, plan: UpdatePlan, accelerator: Accelerator) -> None:
        self._plan, self._accelerator = plan, accelerator
        self._timeout = timedelta(seconds=plan.timeout)
        self._word = new_name()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=accelerator.device())
        self._buckets: list[Bucket] = []
        self._live: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._nbytes = 0
        self._listening: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._groups: dict[str, UpdateGroup] = {}
        self._connections: dict[threading.Thread, socket.socket] = {}  # of threads that are alive
        self._connecting = threading.Lock()
        self._ordering = threading.Lock()  # one order at a time

    def open(self) -> Offer:
        host = own_address(self._plan)
        self._store = open_store(host, self._timeout)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        return Offer(base_url(host, self._listening.getsockname()[1]), self._word)

    def connect(self) -> None:
        assert self._listening is not None
        self._begin(self._serve, self._listening)

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:  # noqa: ARG002
        self._buckets, self._kept, self._live, self._nbytes = [], [], {}, 0
        for bucket in pack(weights, self._plan.bucket_bytes, self._reserve):
            number = len(self._buckets)
            self._live[number] = self._buffer
            self._live.pop(number - _LIVE, None)
            if self._plan.keeps_weights:
                self._kept.append(self._buffer[: bucket.nbytes].to("cpu", copy=True))
            self._buckets.append(bucket)
            self._nbytes += bucket.nbytes
            yield Bucket(tuple(PackedTensor(one.name, one.shape, one.dtype, 0, "") for one in bucket.tensors), 0)

    def finish(self, version: int) -> Summary:
        return Summary(version, sum(len(bucket.tensors) for bucket in self._buckets), self._nbytes, digest=None)

    def rest(self) -> None:
        """Hold no device memory until the next update; what is kept is in the host's."""
        self._live = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._accelerator.device())

    def close(self) -> None:
        with self._connecting:
            listening, self._listening = self._listening, None
            left = dict(self._connections)
        if listening is not None:
            _hang_up(listening)  # also where nothing serves it yet
        for thread, opened in left.items():
            _hang_up(opened)  # wakes the thread up
            thread.join(_CLOSE_TIMEOUT)
        for group in self._groups.values():
            group.close()
        self._groups, self._store = {}, None
        self._live, self._kept = {}, []

    def _reserve(self, used: int, nbytes: int) -> torch.Tensor:
        if used == 0:  # another bucket, while the one before is being sent
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._buffer.device)
        if nbytes > self._buffer.numel():
            bigger = max(nbytes, min(2 * self._buffer.numel(), self._plan.bucket_bytes))
            grown = torch.empty(bigger, dtype=torch.uint8, device=self._buffer.device)
            grown[:used] = self._buffer[:used]
            self._buffer = grown
        return self._buffer

    def _begin(self, task: Callable[[socket.socket], None], opened: socket.socket) -> None:
        def run() -> None:
            with opened, contextlib.suppress(OSError):  # the other end has gone, or ``close`` hung up
                task(opened)
            with self._connecting:
                del self._connections[thread]

        thread = threading.Thread(target=run, name="weights to servers", daemon=True)
        with self._connecting:
            if self._listening is None:  # closed meanwhile
                opened.close()
                return
            self._connections[thread] = opened
            thread.start()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            self._begin(self._obey, connection)

    def _obey(self, connection: socket.socket) -> None:
        connection.settimeout(_WORD_TIMEOUT)
        with connection.makefile("rwb") as stream:
            while line := stream.readline(_LONGEST_ORDER):
                order = self._order(line)
                if order is None:
                    return
                connection.settimeout(None)
                with self._ordering:
                    answer = self._done(order)
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()

    def _order(self, line: bytes) -> Order | None:
        """None of somebody who is not of this run."""
        try:
            said: Any = json.loads(line)
            word = str(said["word"]).encode()
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        if not secrets.compare_digest(word, self._word.encode()):
            return None
        return cast(Order, said)

    def _done(self, order: Order) -> dict[str, Any]:
        try:
            return self._do(order)
        except (AcceleratorError, RunError, RuntimeError, KeyError) as error:  # told to the one who gave the order
            return {"error": f"{order['do']} {order.get('group', '')}: {error}"}

    def _do(self, order: Order) -> dict[str, Any]:
        assert self._store is not None
        what = order["do"]
        if what == "hello":
            return {"store_port": self._store.port}
        name = order["group"]
        if what == "join":
            self._groups[name] = UpdateGroup(
                self._accelerator, rank=0, size=order["size"], store=self._store, name=name, timeout=self._timeout,
                address=None if self._plan.one_machine else node_address(),
            )  # fmt: skip
        elif what == "send":
            bucket, raw = self._bytes(order["bucket"])
            self._groups[name].broadcast_each(list(bucket.unpack(raw).values()), source=0)
            self._accelerator.synchronize()
        else:
            self._groups.pop(name).close()
        return {}

    def _bytes(self, number: int) -> tuple[Bucket, torch.Tensor]:
        raw = self._live.get(number)
        if raw is None:
            if number >= len(self._kept):
                raise RunError(f"bucket {number} is not kept; it was of an update before")
            raw = self._kept[number].to(self._accelerator.device())
        return self._buckets[number], raw


def _hang_up(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected, or closed already
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


class ServerGroupReceiver:
    """Hands over names, shapes and dtypes: tensors on the ``meta`` device."""

    def tensors(self, bucket: Bucket) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in bucket.tensors}

    def rest(self) -> None:
        return

    def close(self) -> None:
        return


def own_address(plan: UpdatePlan) -> str:
    """Where the servers find this process."""
    if plan.one_machine:
        return "127.0.0.1"
    return node_address()
