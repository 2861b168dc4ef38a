"""The ``tensor`` channel within one process: the engine copies the trainer's tensors where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from train.weight_sync.buckets import Bucket, PackedTensor, group_into_buckets
from train.weight_sync.plan import Summary
from train.weight_sync.sending import Sender, Weights


class InProcessSender(Sender):
    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._tensors = self._nbytes = 0

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:  # noqa: ARG002
        self._tensors = self._nbytes = 0
        for tensors in group_into_buckets(weights, self._bucket_bytes):
            size = sum(tensor.nbytes for tensor in tensors.values())
            packed = tuple(PackedTensor(name, tuple(t.shape), t.dtype, 0, "") for name, t in tensors.items())
            self._tensors += len(tensors)
            self._nbytes += size
            yield Bucket(packed, size, source=tensors)

    def finish(self, version: int) -> Summary:
        return Summary(version, self._tensors, self._nbytes, digest=None)


class InProcessReceiver:
    def tensors(self, bucket: Bucket) -> Iterator[Mapping[str, torch.Tensor]]:
        yield bucket.source

    def rest(self) -> None:
        return

    def close(self) -> None:
        return
