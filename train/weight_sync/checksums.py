"""Checksums of weights on their way: against torn, mixed up and missing tensors, not against forged ones."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_WIDTH = 1024  # columns of the blocks that are summed up
_STEP = 128  # rows at a time, which stay in a core's cache between two readings


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [nbytes], without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # One without elements counts as contiguous whatever its stride, and keeps it.
    return (flat if flat.numel() else flat.new_empty(0)).view(torch.uint8)


def fast_checksum(raw: torch.Tensor) -> str:
    """Of uint8 [nbytes] that start at a multiple of 8 bytes, at the speed of memory, on the device that holds them.

    Rows and columns of the bytes as int64 [rows, 1024] are summed up modulo 2**64, and the sums go through CRC-32.
    """
    if raw.device.type == "cpu":
        return _on_host(raw, None)
    whole = _whole(raw)
    block = raw[:whole].view(torch.int64).view(-1, _WIDTH)
    return _joined(raw, *(part.cpu().numpy() for part in (block.sum(0), block.sum(1), raw[whole:])))


def copy_with_checksum(target: torch.Tensor, source: torch.Tensor) -> str:
    """Fill ``target``, uint8 [bytes of the source] that start at a multiple of 8, with the bytes of ``source``, from
    any device; ``fast_checksum`` of what stands there then."""
    if target.device.type == source.device.type == "cpu" and source.is_contiguous():
        return _on_host(target, bytes_of(source))
    target.view(source.dtype).view(source.shape).copy_(source)
    return fast_checksum(target)


def _on_host(raw: torch.Tensor, source: torch.Tensor | None) -> str:
    """Step by step, each first filled from ``source`` if there is one: memory is read once for all of it."""
    array, whole = raw.numpy(), _whole(raw)
    given = None if source is None else source.numpy()
    blocks = array[:whole].view(np.int64).reshape(-1, _WIDTH)
    columns, of_step = np.zeros(_WIDTH, np.int64), np.empty(_WIDTH, np.int64)
    rows = np.empty(len(blocks), np.int64)
    for start in range(0, len(blocks), _STEP):
        part = slice(start, start + _STEP)
        if given is not None:
            here = slice(start * 8 * _WIDTH, min((start + _STEP) * 8 * _WIDTH, whole))
            array[here] = given[here]
        np.add.reduce(blocks[part], axis=0, out=of_step)
        columns += of_step
        np.add.reduce(blocks[part], axis=1, out=rows[part])
    if given is not None:
        array[whole:] = given[whole:]
    return _joined(raw, columns, rows, array[whole:])


def _whole(raw: torch.Tensor) -> int:
    """Bytes that whole rows take."""
    return raw.numel() // (8 * _WIDTH) * 8 * _WIDTH


def _joined(raw: torch.Tensor, *parts: NDArray[Any]) -> str:
    crc = zlib.crc32(str(raw.numel()).encode())
    for part in parts:
        crc = zlib.crc32(part.tobytes(), crc)
    return f"{crc:08x}"


def strong_checksum(raw: torch.Tensor) -> str:
    """SHA-256: where equal checksums mean that a tensor is not sent at all."""
    return hashlib.sha256(raw.cpu().numpy().data).hexdigest()


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum of a whole update, whatever the order in which tensors came. ``checksums``: by tensor."""
    lines = "".join(f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()
