"""Weights on their way between processes: whole tensors packed into buckets of bounded size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from train.weight_sync.checksums import copy_with_checksum


@dataclass(frozen=True)
class PackedTensor:
    """Where a tensor lies in its bucket. ``offset``: bytes from the bucket's beginning, a multiple of 16."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    checksum: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """What is said of a bucket; its bytes travel otherwise. ``source``: where they are found, if that is not known."""

    tensors: tuple[PackedTensor, ...]
    nbytes: int
    source: Any = None

    def unpack(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views into ``raw``, uint8 [at least nbytes]; the receiver copies what it keeps."""
        return {
            packed.name: raw[packed.offset : packed.offset + packed.nbytes].view(packed.dtype).view(packed.shape)
            for packed in self.tensors
        }


def pack(
    weights: Iterable[tuple[str, torch.Tensor]],
    max_bytes: int,
    reserve: Callable[[int, int], torch.Tensor],
) -> Iterator[Bucket]:
    """Copy consecutive tensors, from any device, into one buffer until ``max_bytes``; a larger tensor goes alone.

    ``reserve(used, nbytes)``: uint8 [nbytes or more] for the bucket under way, whose first ``used`` bytes are kept; 0
    begins another bucket. Besides buffers one tensor is held, so that memory is bounded by ``max_bytes`` and the
    largest tensor.
    """
    packed: list[PackedTensor] = []
    used = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        end = used + aligned(size)
        if packed and end > max_bytes:
            yield Bucket(tuple(packed), used)
            packed, used, end = [], 0, aligned(size)
        target = reserve(used, end)[used : used + size]
        checksum = copy_with_checksum(target, tensor.detach())
        packed.append(PackedTensor(name, tuple(tensor.shape), tensor.dtype, used, checksum))
        used = end
    if packed:
        yield Bucket(tuple(packed), used)


def group_into_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors together until ``max_bytes``, where they are; a larger tensor is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        tensor_bytes = aligned(tensor.numel() * tensor.element_size())
        if bucket and size + tensor_bytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor_bytes
    if bucket:
        yield bucket


def as_bytes(buffer: Any, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over an object with a buffer, which may be read-only: nothing may be written then."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch knows no read-only tensors and warns of buffers that are.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


def aligned(size: int) -> int:
    """Tensors start at multiples of 16 bytes, which every dtype can be viewed at."""
    return -(-size // 16) * 16
