"""Checksums of weights on their way: against torn, mixed up and missing tensors, not against forged ones."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import torch

_WIDTH = 1024  # columns of the blocks that are summed up


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [nbytes], without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fast_checksum(raw: torch.Tensor) -> str:
    """Of uint8 [nbytes] that start at a multiple of 8 bytes, at the speed of memory, on the device that holds them.

    Rows and columns of the bytes as int64 [rows, 1024] are summed up modulo 2**64, and the sums go through CRC-32.
    """
    whole = raw.numel() // (8 * _WIDTH) * 8 * _WIDTH
    block = raw[:whole].view(torch.int64).view(-1, _WIDTH)
    crc = zlib.crc32(str(raw.numel()).encode())
    for part in (block.sum(0), block.sum(1), raw[whole:]):
        crc = zlib.crc32(part.cpu().numpy().tobytes(), crc)
    return f"{crc:08x}"


def strong_checksum(raw: torch.Tensor) -> str:
    """SHA-256: where equal checksums mean that a tensor is not sent at all."""
    return hashlib.sha256(raw.cpu().numpy().data).hexdigest()


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum of a whole update, whatever the order in which tensors came. ``checksums``: by tensor."""
    lines = "".join(f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()
