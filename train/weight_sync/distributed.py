"""The ``distributed`` channel: a broadcast over a group of the trainer's first rank and the rollout worker."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from accel.comm.addresses import own_address
from accel.comm.process_groups import tcp_address
from accel.comm.update_group import UpdateGroup, open_store
from accel.contract import Accelerator
from samples.errors import InputError
from train.weight_sync.buckets import Bucket, pack
from train.weight_sync.leftovers import held_directory, new_name, sweep
from train.weight_sync.plan import Offer, UpdatePlan
from train.weight_sync.sending import Sender, Weights

REACHED_WITHIN = 20.0  # seconds, for a connection to the trainer


class BroadcastSender(Sender):
    """Packs a bucket on the device, and broadcasts it while the other end receives it."""

    def __init__(self, plan: UpdatePlan, accelerator: Accelerator) -> None:
        self._plan, self._accelerator = plan, accelerator
        self._store: dist.Store | None = None
        self._root: Path | None = None  # of the store, where that is a file
        self._lock = -1
        self._name = new_name()
        self._group: UpdateGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=accelerator.device())
        self._nbytes = 0

    def open(self) -> Offer:
        if self._plan.one_machine:  # no port has to be opened for the store
            parent = Path(self._plan.directory)
            try:
                parent.mkdir(parents=True, exist_ok=True)
                sweep(parent)
                self._root, self._lock = held_directory(parent)
            except OSError as error:
                raise InputError(
                    f"--weight-update-dir {parent}: cannot be written ({error.strerror}); give another"
                ) from error
            file = str(self._root / "store")
            self._store = dist.FileStore(file, 2)
            return Offer(file, self._name)
        host = node_address()
        self._store = store = open_store(host, timedelta(seconds=self._plan.timeout))
        return Offer(tcp_address(host, store.port), self._name)

    def connect(self) -> None:
        assert self._store is not None
        self._group = _group(self._plan, self._accelerator, self._store, self._name, rank=0)

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:  # noqa: ARG002
        for bucket in pack(weights, self._plan.bucket_bytes, self._reserve):
            self._nbytes = bucket.nbytes
            yield bucket

    def send(self) -> None:
        assert self._group is not None
        self._group.broadcast(self._buffer[: self._nbytes], source=0)
        self._accelerator.synchronize()  # the buffer is packed anew next

    def rest(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._buffer.device)

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()
        root, self._root = self._root, None
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(self._lock)

    def _reserve(self, used: int, nbytes: int) -> torch.Tensor:
        if nbytes > self._buffer.numel():
            bigger = min(max(nbytes, 2 * self._buffer.numel()), max(nbytes, self._plan.bucket_bytes))
            grown = torch.empty(bigger, dtype=torch.uint8, device=self._buffer.device)
            grown[:used] = self._buffer[:used]
            self._buffer = grown
        return self._buffer


class BroadcastReceiver:
    def __init__(self, plan: UpdatePlan, offer: Offer, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffer = torch.empty(0, dtype=torch.uint8, device=accelerator.device())
        self._group = _group(plan, accelerator, _store(plan, offer), offer.word, rank=1)

    def tensors(self, bucket: Bucket) -> Iterator[Mapping[str, torch.Tensor]]:
        if bucket.nbytes > self._buffer.numel():
            self._buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._buffer.device)
        raw = self._buffer[: bucket.nbytes]
        self._group.broadcast(raw, source=0)
        self._accelerator.synchronize()
        yield bucket.unpack(raw)

    def rest(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._buffer.device)

    def close(self) -> None:
        self._group.close()


def _group(plan: UpdatePlan, accelerator: Accelerator, store: dist.Store, name: str, *, rank: int) -> UpdateGroup:
    return UpdateGroup(
        accelerator,
        rank=rank,
        size=2,
        store=store,
        name=name,
        timeout=timedelta(seconds=plan.timeout),
        address=None if plan.one_machine else node_address(),
    )


def _store(plan: UpdatePlan, offer: Offer) -> dist.Store:
    if plan.one_machine:
        return dist.FileStore(offer.place, 2)
    parts = urlsplit(offer.place)
    assert parts.hostname is not None
    assert parts.port is not None
    limit = timedelta(seconds=plan.timeout)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=min(plan.timeout / 2, REACHED_WITHIN)).close()
        return dist.TCPStore(parts.hostname, parts.port, 2, is_master=False, wait_for_workers=False, timeout=limit)
    except (OSError, dist.DistNetworkError) as error:
        raise InputError(
            f"--weight-update-channel distributed: the rollout worker on {node_address()} does not reach the trainer "
            f"at {offer.place} ({error}); if that is the wrong one of the trainer's addresses, give Ray another "
            "(ray start --node-ip-address); else let the machines connect to each other's ports, or use disk with a "
            "--weight-update-dir that both see"
        ) from error


def node_address() -> str:
    """This machine's address on the cluster, as Ray's other nodes reach it; without Ray, that of its way to others."""
    if "ray" in sys.modules:  # else this process is no worker of Ray's
        import ray

        if ray.is_initialized():
            return str(ray.util.get_node_ip_address())
    return own_address()
