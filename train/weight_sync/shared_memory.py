"""The ``tensor`` channel between processes of one machine: two buffers in shared memory that take turns."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from samples.errors import InputError, RunError
from train.weight_sync.buckets import Bucket, as_bytes, pack
from train.weight_sync.leftovers import held_file, new_name, sweep
from train.weight_sync.plan import Offer, UpdatePlan
from train.weight_sync.sending import Sender, Weights

SHARED = Path("/dev/shm")


def _places(fallback: Path) -> list[Path]:
    """Where shared memory may lie, the fastest first."""
    return [SHARED, Path(tempfile.gettempdir()), fallback] if SHARED.is_dir() else [fallback]


class SharedMemoryFull(OSError):
    """No place has room for a buffer."""


@dataclass(frozen=True)
class Place:
    """Of a bucket's bytes."""

    path: str
    capacity: int


class SharedBuffer:
    """Growing shared memory in a file without a name that lasts: it is removed once the other end has opened it.

    It grows beyond ``limit`` bytes only where more is asked for at once.
    """

    def __init__(self, fallback: Path, limit: int) -> None:
        self._limit = limit
        self._parents = _places(fallback)
        self._path: Path | None = None
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._capacity = 0

    @property
    def place(self) -> Place:
        return Place(str(self._path), self._capacity)

    def reserve(self, used: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes or more] whose first ``used`` bytes are as they were."""
        if nbytes > self._capacity:
            self._grow(used, max(nbytes, min(2 * self._capacity, self._limit)))
        assert self._map is not None
        return as_bytes(self._map, self._capacity)

    def unlink(self) -> None:
        """Nothing of it stays if this process is killed. The other end has it open."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._capacity, self._path = -1, 0, None

    def _grow(self, used: int, nbytes: int) -> None:
        if self._descriptor >= 0:
            try:
                # Reserved now: writing to memory that is not there would end the process.
                os.posix_fallocate(self._descriptor, 0, nbytes)
            except OSError:
                pass  # moved to another place below
            else:
                self._map, self._capacity = mmap.mmap(self._descriptor, nbytes), nbytes
                return
        before = bytes(self._map[:used]) if self._map is not None else b""
        self.close()
        self._open(nbytes)
        assert self._map is not None
        self._map[:used] = before

    def _open(self, nbytes: int) -> None:
        for parent in self._parents:
            try:
                path, descriptor = held_file(parent)
            except OSError:
                continue
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError:
                os.close(descriptor)
                path.unlink()
                continue
            self._path, self._descriptor = path, descriptor
            self._map, self._capacity = mmap.mmap(descriptor, nbytes), nbytes
            return
        places = ", ".join(map(str, self._parents))
        raise SharedMemoryFull(f"no room for {nbytes} bytes of shared memory in {places}")


class SharedMemorySender(Sender):
    """Packs a bucket into one buffer while the other end reads the one before out of the other."""

    def __init__(self, plan: UpdatePlan) -> None:
        self._plan = plan
        self._buffers = [SharedBuffer(Path(plan.directory), plan.bucket_bytes) for _ in range(2)]
        self._probe: tuple[Path, int] | None = None
        self._turn = 0

    def open(self) -> Offer:
        word = new_name()
        failures: list[str] = []
        places = _places(Path(self._plan.directory))
        for parent in places:
            sweep(parent)
        for parent in places:
            try:
                self._probe = path, descriptor = held_file(parent)
                os.write(descriptor, word.encode())
            except OSError as error:  # full, or not to be written to: the same places as for a buffer
                failures.append(f"{parent} ({error.strerror})")
                self._end_probe()
            else:
                return Offer(str(path), word)
        raise InputError(
            f"--weight-update-channel tensor: no memory can be shared in {', '.join(failures)}; make room, or use disk "
            "with another --weight-update-dir"
        )

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:  # noqa: ARG002
        self._end_probe()
        packed = pack(weights, self._plan.bucket_bytes, self._reserve)
        try:
            for bucket in packed:
                buffer = self._buffers[self._turn]
                yield replace(bucket, source=buffer.place)
                self._turn = 1 - self._turn
        except SharedMemoryFull as error:
            raise RunError(f"{error}; lower --update-weight-buffer-size {self._plan.bucket_bytes}") from error

    def _reserve(self, used: int, nbytes: int) -> torch.Tensor:
        buffer = self._buffers[self._turn]
        if used == 0:
            buffer.unlink()  # what it held two buckets ago was read, so the other end has it open
        return buffer.reserve(used, nbytes)

    def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe[0].unlink(missing_ok=True)
            os.close(probe[1])

    def rest(self) -> None:
        for buffer in self._buffers:
            buffer.close()

    def close(self) -> None:
        self._end_probe()
        for buffer in self._buffers:
            buffer.close()


class SharedMemoryReceiver:
    """Reads where the sender packed; a file is opened once."""

    def __init__(self, offer: Offer) -> None:
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}
        try:
            found = Path(offer.place).read_text(encoding="utf-8")
        except OSError:
            found = ""
        if found != offer.word:
            raise InputError(
                "--weight-update-channel tensor: the rollout worker does not see the trainer's shared memory, they are "
                "on different machines; use distributed, or disk with a --weight-update-dir that both see"
            )

    def tensors(self, bucket: Bucket) -> Iterator[dict[str, torch.Tensor]]:
        place: Place = bucket.source
        yield bucket.unpack(as_bytes(self._mapped(place), bucket.nbytes))

    def rest(self) -> None:
        self.close()

    def close(self) -> None:
        for descriptor, _ in self._maps.values():
            os.close(descriptor)
        self._maps = {}

    def _mapped(self, place: Place) -> mmap.mmap:
        if place.path not in self._maps:
            descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            self._maps[place.path] = descriptor, mmap.mmap(descriptor, place.capacity, prot=mmap.PROT_READ)
        descriptor, mapped = self._maps.pop(place.path)
        if len(mapped) < place.capacity:
            mapped = mmap.mmap(descriptor, place.capacity, prot=mmap.PROT_READ)
        self._maps[place.path] = descriptor, mapped
        while len(self._maps) > 2:  # the sender moved a buffer: the longest unused is gone on its side
            os.close(self._maps.pop(next(iter(self._maps)))[0])
        return mapped
