"""Tensors on their way into safetensors files: written through to the disk, with a checksum made on the way.

The files are written here and not by the safetensors package because an error has to say what the system said (a full
disk), the checksum has to be of what was meant to be written, and the data has to be on the disk before the checkpoint
gets its name. Reading is the package's work.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from train.checkpoint.manifest import FileFacts

SHARD_BYTES = 2 * 10**9  # held in host memory until the file that they go to is full
_CHUNK = 64 * 2**20
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFiles:
    """One set of tensors in ``directory``: ``<stem>.safetensors``, or numbered files with an index as transformers has.

    ``files`` holds the facts of what is written, once ``finish`` has returned.
    """

    def __init__(self, directory: Path, stem: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._stem = stem
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[tuple[list[str], FileFacts]] = []
        self.files: dict[str, FileFacts] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, on any device; it must keep its value until ``finish``. Raises OSError."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._write_shard()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Write what is left and give the files their names, which say how many there are. Raises OSError."""
        self._write_shard()
        count = len(self._shards)
        if count == 1:
            self._name(0, f"{self._stem}.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (names, _) in enumerate(self._shards):
            file = f"{self._stem}-{number + 1:05d}-of-{count:05d}.safetensors"
            self._name(number, file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        file = f"{self._stem}.safetensors.index.json"
        self.files[file] = write_file(self._directory / file, [json.dumps(index, indent=2).encode()])

    def _name(self, number: int, file: str) -> None:
        self._part(number).rename(self._directory / file)
        self.files[file] = self._shards[number][1]

    def _write_shard(self) -> None:
        facts = write_file(self._part(len(self._shards)), _serialized(self._pending))
        self._shards.append((list(self._pending), facts))
        self._pending = {}
        self._pending_bytes = 0

    def _part(self, number: int) -> Path:
        return self._directory / f"{self._stem}.part-{number}"


def write_file(path: Path, pieces: Iterator[memoryview | bytes] | list[bytes]) -> FileFacts:
    """Write a new file through to the disk; its size and checksum are those of ``pieces``. Raises OSError."""
    size = checksum = 0

    def counted() -> Iterator[memoryview]:
        nonlocal size, checksum
        for piece in pieces:
            view = memoryview(piece)
            checksum = zlib.crc32(view, checksum)
            size += len(view)
            yield view

    _write_through(path, counted())
    return FileFacts(bytes=size, crc32=checksum)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on the host, in one piece each, through to the disk as a new safetensors file. Raises OSError."""
    _write_through(path, _serialized(tensors))


def _write_through(path: Path, pieces: Iterator[memoryview | bytes] | Iterator[memoryview]) -> None:
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def file_checksum(path: Path) -> int:
    """The CRC-32 of a file's content. Raises OSError."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def sync_directory(directory: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _serialized(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview | bytes]:
    """The safetensors format: the header, then the tensors' bytes one after the other."""
    yield tensor_header([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    for tensor in tensors.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def tensor_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The beginning of a safetensors file that holds these, one after the other: length of the JSON, and the JSON."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text
