"""Weights on their way between processes: whole tensors gathered into buckets of bounded size."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class FlatBucket:
    """Several tensors as one uint8 array: one object for the object store, read there without a copy."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    data: NDArray[np.uint8]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read-only views into ``data``; the receiver copies what it keeps."""
        out: dict[str, torch.Tensor] = {}
        with warnings.catch_warnings():
            # Objects of Ray's store are read-only and torch knows no such tensors; nothing writes through these views.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            flat = (
                torch.frombuffer(self.data, dtype=torch.uint8) if self.data.size else torch.empty(0, dtype=torch.uint8)
            )
        offset = 0
        for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True):
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            out[name] = flat[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)
        return out


def group_into_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors together until ``max_bytes``; a larger tensor is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + tensor_bytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor_bytes
    if bucket:
        yield bucket


def flatten_bucket(bucket: Mapping[str, torch.Tensor]) -> FlatBucket:
    """Copy a bucket's tensors, from any device, into one host array."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in bucket.values()]
    data = np.zeros(sum(map(_aligned, sizes)), dtype=np.uint8)
    offset = 0
    for tensor, size in zip(bucket.values(), sizes, strict=True):
        if size:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            data[offset : offset + size] = raw.numpy()
        offset += _aligned(size)
    return FlatBucket(
        names=tuple(bucket),
        shapes=tuple(tuple(tensor.shape) for tensor in bucket.values()),
        dtypes=tuple(tensor.dtype for tensor in bucket.values()),
        data=data,
    )


def _aligned(size: int) -> int:
    """Tensors start at multiples of 16 bytes, which every dtype can be viewed at."""
    return -(-size // 16) * 16
