"""The trainer's end of a weight channel. Every rank has one, since gathering is collective; the first rank sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import TypeAlias

import torch

from accel.contract import Accelerator
from samples.errors import RunError
from train.weight_sync.buckets import Bucket
from train.weight_sync.checksums import digest
from train.weight_sync.plan import Offer, Summary, UpdatePlan

Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class Sender(ABC):
    """One way out, on the first rank."""

    def open(self) -> Offer | None:
        """Open what the other end is to find, if anything."""
        return None

    def connect(self) -> None:
        """Meet the other end, while that is being opened with the offer."""
        return

    @abstractmethod
    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:
        """Draw all of ``weights``, and yield what the other end is to take meanwhile.

        A bucket's bytes stay until the second one after it is drawn. ``held``: version that the engine holds whole.
        """

    def send(self) -> None:
        """Send the bucket that was drawn last, while the other end takes it."""
        return

    def finish(self, version: int) -> Summary | None:  # noqa: ARG002
        """All was drawn. None: buckets say it all."""
        return None

    def rest(self) -> None:
        """Give the memory of buffers back until the next update."""
        return

    def close(self) -> None:
        return


class _Draw(Sender):
    """A rank that only helps to gather, in the same steps as the first one."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:  # noqa: ARG002
        from train.weight_sync.buckets import group_into_buckets

        for _ in group_into_buckets(weights, self._bucket_bytes):
            yield Bucket((), 0)


class SendingEnd:
    """``weights`` begins an export: whole tensors under Hugging Face names, in the same order on every rank."""

    def __init__(self, weights: Callable[[], Weights], accelerator: Accelerator, rank: int) -> None:
        self._weights, self._accelerator, self._rank = weights, accelerator, rank
        self._plan: UpdatePlan | None = None
        self._sender: Sender | None = None
        self._buckets: Iterator[Bucket] = iter(())
        self._export: Weights = iter(())
        self._version = -1
        self._checksums: dict[str, str] = {}
        self._nbytes = 0
        self._broke_off = False

    def open(self, plan: UpdatePlan) -> Offer | None:
        from train.weight_sync.factory import open_sender

        self.close()
        self._plan = plan
        self._sender = open_sender(plan, self._accelerator) if self._rank == 0 else _Draw(plan.bucket_bytes)
        return self._sender.open()

    def connect(self) -> None:
        self._open().connect()

    def begin(self, version: int, held: int | None) -> None:
        """Make ready to draw ``version``; an update that was under way is given up. RunError where that cannot be."""
        if not self.cancel():
            raise RunError("the weights cannot be gathered anew: the last time broke off in the middle of a gathering")
        self._version, self._checksums, self._nbytes = version, {}, 0
        self._export = self._whole_export()
        self._buckets = self._open().buckets(version, held, self._export)

    def next_bucket(self) -> Bucket | None:
        """Collective. None on the first rank once all weights are drawn; what others return says nothing."""
        assert self._plan is not None
        if self._plan.at_once and self._rank:
            for _ in self._buckets:
                pass
            return None
        bucket = next(self._buckets, None)
        if bucket is not None:
            self._checksums |= {packed.name: packed.checksum for packed in bucket.tensors}
            self._nbytes += bucket.nbytes
        return bucket

    def _whole_export(self) -> Weights:
        """Notes whether gathering itself failed: then other ranks may wait in a collective for ever."""
        self._broke_off = True
        yield from self._weights()
        self._broke_off = False

    def send(self) -> None:
        self._open().send()

    def finish(self) -> Summary:
        summary = self._open().finish(self._version)
        if summary is not None:
            return summary
        return Summary(self._version, len(self._checksums), self._nbytes, digest(self._checksums))

    def cancel(self) -> bool:
        """Give up an update that was not drawn to its end; whether another may begin.

        Collective where gathering is: what is left of the export is drawn for nothing, since a rank that stopped in
        the middle would meet the others' next gathering with its first.
        """
        buckets, self._buckets = self._buckets, iter(())
        if isinstance(buckets, Generator):
            buckets.close()
        try:
            for _ in self._export:
                pass
        finally:
            self._export = iter(())
        return not self._broke_off

    def rest(self) -> None:
        """Hold no memory until the next update."""
        self.cancel()
        if self._sender is not None:
            self._sender.rest()

    def close(self) -> None:
        """Harmless twice, and before ``open``."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _open(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("the weight channel is not open")
        return self._sender
