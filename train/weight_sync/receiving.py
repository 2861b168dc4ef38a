"""The rollout worker's end of a weight channel: it checks what arrives and hands it to the engine, all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from accel.contract import Accelerator
from samples.errors import RunError
from train.weight_sync.buckets import Bucket, PackedTensor
from train.weight_sync.checksums import digest, fast_checksum
from train.weight_sync.plan import Manifest, Offer, Summary, UpdatePlan

CACHED_BYTES = 8 << 20
_TELLING = 10.0  # seconds


class UpdatedEngine(Protocol):
    """The engine behind blocking calls (``rollout.worker.RolloutWorker``)."""

    def held_version(self) -> int | None: ...

    def begin_update(self, version: int) -> None: ...

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def keep_weights(self, names: frozenset[str]) -> None: ...

    def commit_update(self, version: int) -> None: ...

    def fail_update(self, reason: str) -> None: ...

    def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]: ...

    def open_server_group(self, address: str, word: str) -> None: ...


class Receiver(Protocol):
    """One way in."""

    def tensors(self, bucket: Bucket) -> Iterator[Mapping[str, torch.Tensor]]:
        """The bucket's tensors, in memory that is valid until the next ones are drawn."""
        ...

    def rest(self) -> None:
        """Give the memory of buffers back until the next update."""
        ...

    def close(self) -> None: ...


class PulledReceiver(Receiver, Protocol):
    """One that finds a whole update somewhere, instead of being given buckets."""

    def manifest(self, summary: Summary) -> Manifest: ...

    def pull(self, summary: Summary) -> Iterator[Mapping[str, torch.Tensor]]: ...


class ReceivingEnd:
    """``take`` and ``commit`` raise what keeps an update from being whole; the engine answers nothing then until
    another update is. So it does when the trainer falls silent in the middle, for the plan's time limit."""

    def __init__(self, engine: UpdatedEngine, accelerator: Accelerator) -> None:
        self._engine, self._accelerator = engine, accelerator
        self._plan: UpdatePlan | None = None
        self._receiver: Receiver | None = None
        self._lease: threading.Timer | None = None
        self._run_out: threading.Timer | None = None  # the lease whose time was up in the update under way
        self._lease_changes = threading.Lock()
        self._checksums: dict[str, str] = {}
        self._committed: dict[str, str] = {}  # of the last whole update, as disk_delta has them
        self._mixed = False  # the engine may hold tensors of two versions

    def open(self, plan: UpdatePlan, offer: Offer | None) -> None:
        from train.weight_sync.factory import open_receiver

        self.close()
        self._plan = plan
        self._receiver = open_receiver(plan, offer, self._accelerator)
        if plan.channel == "server_group":
            assert offer is not None
            self._engine.open_server_group(offer.place, offer.word)

    def held(self) -> int | None:
        """The version that the engine holds whole, and that an update may leave tensors of in place."""
        return self._engine.held_version() if self._committed else None

    def begin(self, version: int) -> None:
        run_out, self._run_out = self._run_out, None
        if run_out is not None:
            run_out.join(_TELLING)  # what it tells the engine is of the update before
        self._checksums = {}
        self._mixed = True
        self._engine.begin_update(version)
        self._renew(version)

    def take(self, bucket: Bucket, version: int) -> None:
        self._renew(version)
        try:
            for tensors in self._open().tensors(bucket):
                for part in _parts(bucket):
                    for packed in part:
                        self._note(packed.name, packed.checksum, tensors[packed.name])
                    self._engine.update_weights({packed.name: tensors[packed.name] for packed in part})
        except BaseException as error:
            self.fail(str(error))
            raise
        self._renew(version)

    def commit(self, summary: Summary) -> None:
        self._end_lease()  # nothing more is to come
        try:
            if self._run_out is not None:
                raise RunError(f"weight update to version {summary.version}: the last word came too late")
            arrived = self._checksums
            if summary.digest is not None and (len(arrived), digest(arrived)) != (summary.tensors, summary.digest):
                raise RunError(
                    f"weight update to version {summary.version}: {len(arrived)} tensors arrived, {summary.tensors} "
                    "were sent, and their checksums differ"
                )
            self._engine.commit_update(summary.version)
        except BaseException as error:
            self.fail(str(error))
            raise
        self._mixed = False

    def pull(self, summary: Summary) -> None:
        """A whole update from where the trainer has put it: the engine stands still only while it is read."""
        receiver = self._pulled()
        manifest = receiver.manifest(summary)
        names = manifest.tensors | manifest.kept
        if (len(names), digest(names)) != (summary.tensors, summary.digest):
            raise RunError(f"{summary.directory}: weights.json is not the one that the trainer wrote")
        if manifest.kept and (
            self.held() != manifest.base
            or any(self._committed.get(name) != checksum for name, checksum in manifest.kept.items())
        ):
            raise RunError(f"{summary.directory} builds on version {manifest.base}, which the engine does not hold")
        self._mixed = True
        self._engine.begin_update(summary.version)
        try:
            for tensors in receiver.pull(summary):
                self._engine.update_weights(tensors)
            if manifest.kept:
                self._engine.keep_weights(frozenset(manifest.kept))
            self._engine.commit_update(summary.version)
        except BaseException as error:
            self.fail(str(error))
            raise
        self._committed, self._mixed = names, False

    def compare(self, bucket: Bucket) -> list[str]:
        """Names of the bucket's tensors that the engine holds differently."""
        return self._different(self._open().tensors(bucket))

    def compare_pulled(self, summary: Summary) -> list[str]:
        return self._different(self._pulled().pull(summary))

    def fail(self, reason: str) -> None:
        """Have the engine answer nothing until it has been sent everything; harmless where no update is under way."""
        self._end_lease()
        self._committed = {}
        if self._mixed:
            self._engine.fail_update(reason)

    def rest(self) -> None:
        """Hold no memory until the next update."""
        if self._receiver is not None:
            self._receiver.rest()

    def close(self) -> None:
        self._end_lease()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _different(self, pulled: Iterator[Mapping[str, torch.Tensor]]) -> list[str]:
        names = [name for tensors in pulled for name in self._engine.differing_weights(tensors)]
        self._mixed = self._mixed or bool(names)
        return names

    def _note(self, name: str, sent: str, tensor: torch.Tensor) -> None:
        found = sent if sent == "" else fast_checksum(tensor.reshape(-1).view(torch.uint8))
        if found != sent:
            raise RunError(f"{name} arrived with checksum {found}, it was sent with {sent}")
        self._checksums[name] = found

    def _renew(self, version: int) -> None:
        self._end_lease()
        assert self._plan is not None
        reason = f"nothing came from the trainer for {self._plan.timeout:g} s (--weight-update-timeout)"
        lease = threading.Timer(self._plan.timeout, lambda: self._over(lease, reason))
        lease.daemon = True
        lease.name = f"lease of weight version {version}"
        with self._lease_changes:
            self._lease = lease
            lease.start()

    def _over(self, lease: threading.Timer, reason: str) -> None:
        with self._lease_changes:
            if self._lease is not lease:  # it ended, or was renewed, in the moment in which its time was up
                return
            self._lease, self._run_out = None, lease
        self.fail(reason)

    def _end_lease(self) -> None:
        with self._lease_changes:
            if self._lease is not None:
                self._lease.cancel()
                self._lease = None

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("the weight channel is not open")
        return self._receiver

    def _pulled(self) -> PulledReceiver:
        from train.weight_sync.disk import DiskReceiver

        receiver = self._open()
        assert isinstance(receiver, DiskReceiver)
        return receiver


def _parts(bucket: Bucket) -> Iterator[list[PackedTensor]]:
    """Consecutive tensors of a bucket that a cache holds together, so that they are checked and copied in one reading
    of memory; one that is larger stands alone."""
    part: list[PackedTensor] = []
    size = 0
    for packed in bucket.tensors:
        if part and size + packed.nbytes > CACHED_BYTES:
            yield part
            part, size = [], 0
        part.append(packed)
        size += packed.nbytes
    if part:
        yield part
