"""Shards of a model whose tensors are known before any is made, so that several threads write them in any order.

Names, dtypes and shapes give every file's header and every tensor's place in it. Writing lets go of Python's lock, and
so do reading and converting in torch, which is why threads are enough.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from train.checkpoint.tensor_files import tensor_header


@dataclass(frozen=True)
class PlannedTensor:
    """What a tensor will be."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Place:
    tensor: PlannedTensor
    descriptor: int
    offset: int


@dataclass
class PlannedShards:
    """Files ``directory/part-N`` of at most ``shard_bytes``, but for a tensor that is larger. A context manager."""

    directory: Path
    shard_bytes: int
    shards: list[list[PlannedTensor]] = field(default_factory=list)
    _places: dict[str, _Place] = field(default_factory=dict)
    _descriptors: list[int] = field(default_factory=list)

    def __enter__(self) -> PlannedShards:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def plan(self, tensors: Iterable[PlannedTensor]) -> None:
        """Make the files, with headers and without data. Raises OSError."""
        size = 0
        for tensor in tensors:
            if not self.shards or size + tensor.bytes > self.shard_bytes:
                self.shards.append([])
                size = 0
            self.shards[-1].append(tensor)
            size += tensor.bytes
        for number, shard in enumerate(self.shards):
            self._make(self.directory / f"part-{number}", shard)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, of any thread. Raises OSError, and ValueError for one that is not as it was planned."""
        place = self._places.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != (place.tensor.dtype, place.tensor.shape):
            raise ValueError(f"{place.tensor} was planned, not {tensor.dtype} {tuple(tensor.shape)}")
        view = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        offset = place.offset
        while view:
            written = os.pwrite(place.descriptor, view, offset)
            offset += written
            view = view[written:]

    def sync(self, number: int) -> None:
        """Bring a file to the disk. Raises OSError."""
        os.fsync(self._descriptors[number])

    def check_complete(self) -> None:
        """Raise ValueError unless all that was planned is there."""
        if self._places:
            raise ValueError(f"{len(self._places)} planned tensors were not written, {next(iter(self._places))} first")

    def _make(self, path: Path, shard: Sequence[PlannedTensor]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._descriptors.append(descriptor)
        header = memoryview(tensor_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in shard]))
        offset = len(header)
        while header:
            header = header[os.write(descriptor, header) :]
        for tensor in shard:
            self._places[tensor.name] = _Place(tensor, descriptor, offset)
            offset += tensor.bytes
        os.ftruncate(descriptor, offset)
