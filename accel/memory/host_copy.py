"""Device memory that waits in the host's memory, or in a file, while another role uses the device."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from accel.contract import Accelerator
from accel.errors import AcceleratorError

_PIECE = 64 * 1024 * 1024  # bytes copied at once: a power of two, to which allocators of pinned memory round up


@dataclass(frozen=True)
class _Moved:
    """A storage that was emptied. ``offset``: of its bytes in the host copy; None where every one was zero."""

    storage: torch.UntypedStorage
    nbytes: int
    offset: int | None


class HostCopy:
    """Moves storages out of device memory and back. ``directory``: of the file, where device memory is the host's.

    A storage is emptied and later filled again under the tensors that view it. So tensors stay the objects they are:
    ties, views into contiguous buffers, optimizer state by parameter and marks on parameters all hold. Between
    ``release`` and ``resume`` nothing may read or write them. What is all zero, as cleared gradients are, is not
    copied.

    On a device the storage's memory is freed. The host's is kept as an address range whose pages go back to the system
    (``madvise``), for torch refuses to free a storage that anything has ever looked at through numpy.
    """

    def __init__(self, accelerator: Accelerator, directory: Path | None = None) -> None:
        self._accelerator = accelerator
        capabilities = accelerator.capabilities
        self._in_place = capabilities.host_memory
        self._place: _Place = _File(directory) if capabilities.host_memory else _Host(capabilities.pinned_memory)
        self._moved: list[_Moved] = []

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that ``resume`` takes."""
        return sum(moved.nbytes for moved in self._moved)

    def release(self, tensors: Iterable[torch.Tensor]) -> int:
        """Move what these tensors view, each storage once; returns the bytes of device memory given back.

        AcceleratorError when the host has no room; everything is then where it was.
        """
        if self._moved:
            raise RuntimeError("this memory is released already")
        storages = [storage for storage in storages_of(tensors) if storage.nbytes()]
        moves: list[_Moved] = []
        used = 0
        for storage in storages:
            raw = bytes_in(storage)
            zero = not any(bool(piece.any()) for piece in raw.split(_PIECE))
            moves.append(_Moved(storage, storage.nbytes(), None if zero else used))
            used += 0 if zero else -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._place.reserve(used)
        for move in moves:
            if move.offset is not None:
                self._place.write(move.offset, bytes_in(move.storage))
            self._accelerator.synchronize()  # the copy is done before its source goes
            self._free(move.storage)
            self._moved.append(move)
        self._accelerator.empty_cache()
        return self.nbytes

    def resume(self) -> int:
        """Take the memory again and fill it; returns its bytes. Without a release before it nothing is done."""
        taken = 0
        while self._moved:
            move = self._moved[-1]
            if not self._in_place:
                move.storage.resize_(move.nbytes)
            raw = bytes_in(move.storage)
            if move.offset is None:
                if not self._in_place:  # pages that come back are zero
                    raw.zero_()
            else:
                self._place.read(move.offset, raw)
            taken += move.nbytes
            self._moved.pop()
        self._accelerator.synchronize()
        return taken

    def _free(self, storage: torch.UntypedStorage) -> None:
        if not self._in_place:
            storage.resize_(0)
            return
        address, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Give the host's memory, or the file, back; what is in it is lost."""
        self._moved = []
        self._place.close()


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """What tensors view, each storage once, in order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes] over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class _Place(ABC):
    """Bytes outside the device's memory, in pieces."""

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Make room; what was there may be lost."""

    @abstractmethod
    def _pieces(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        """uint8 views that follow each other, each valid until the next is drawn."""

    @abstractmethod
    def close(self) -> None: ...

    def write(self, offset: int, raw: torch.Tensor) -> None:
        done = 0
        for piece in self._pieces(offset, raw.numel()):
            piece.copy_(raw[done : done + piece.numel()], non_blocking=True)
            done += piece.numel()

    def read(self, offset: int, raw: torch.Tensor) -> None:
        done = 0
        for piece in self._pieces(offset, raw.numel()):
            raw[done : done + piece.numel()].copy_(piece, non_blocking=True)
            done += piece.numel()


class _Host(_Place):
    """Host memory, pinned where the device copies faster from such."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []

    def reserve(self, nbytes: int) -> None:
        if sum(block.numel() for block in self._blocks) >= nbytes:
            return
        self._blocks = []
        for start in range(0, nbytes, _PIECE):
            size = min(_PIECE, nbytes - start)
            try:
                self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            except RuntimeError as error:
                self._blocks = []
                raise AcceleratorError(f"the host has no room for {nbytes} bytes of device memory: {error}") from error

    def _pieces(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        end = offset + nbytes
        while offset < end:
            number, start = divmod(offset, _PIECE)
            block = self._blocks[number]
            stop = min(block.numel(), start + end - offset)
            yield block[start:stop]
            offset += stop - start

    def close(self) -> None:
        self._blocks = []


class _File(_Place):
    """A mapped file without a name: nothing of it stays when the process ends, however that comes about.

    A piece's pages leave the process as soon as it is copied; the kernel writes them out when it needs the memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = Path(tempfile.gettempdir()) if directory is None else directory
        self._map: mmap.mmap | None = None

    def reserve(self, nbytes: int) -> None:
        if nbytes == 0 or (self._map is not None and len(self._map) >= nbytes):
            return
        self.close()
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="accelrl-offload-") as file:
                # Reserved now: writing to a mapped page that has no room would end the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._map = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise AcceleratorError(
                f"{self._directory}: no room for {nbytes} bytes of a trainer's memory ({error.strerror})"
            ) from error

    def _pieces(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        assert self._map is not None
        for start in range(offset, offset + nbytes, _PIECE):
            size = min(_PIECE, offset + nbytes - start)
            yield torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def close(self) -> None:
        self._map = None
