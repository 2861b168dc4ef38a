"""What a trainer rank holds on its device, and its way to the host and back between the trainer's turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel.contract import Accelerator
from accel.memory.host_copy import HostCopy, bytes_in, storages_of
from accel.memory.waiting import wait_for_room, wait_until_freed
from samples.errors import RunError
from train.checkpoint.errors import CheckpointWriteError
from train.config.offload import OffloadConfig
from train.weight_sync.checksums import fast_checksum

if TYPE_CHECKING:
    from train.megatron.optimizer import PolicyOptimizer

Tag = Literal["weights", "optimizer"]
TAGS: tuple[Tag, ...] = ("weights", "optimizer")
_SIDE = "the trainer"


class TrainerMemory:
    """Gives memory back by tag, and takes it again: ``weights`` (the model and the reference), ``optimizer`` (master
    weights, moments, gradients).

    ``held``: the tensors of a tag, as they are now; what several of them view moves with the first tag in ``TAGS``.
    """

    def __init__(
        self, accelerator: Accelerator, settings: OffloadConfig, held: Callable[[], dict[Tag, list[torch.Tensor]]]
    ) -> None:
        self._accelerator, self._settings, self._held = accelerator, settings, held
        self._copies: dict[Tag, HostCopy] = {}
        self._released: set[Tag] = set()
        self._checksums: dict[Tag, list[str]] = {}

    @property
    def released(self) -> tuple[Tag, ...]:
        return tuple(tag for tag in TAGS if tag in self._released)

    def release(self, tags: Iterable[Tag] = TAGS) -> None:
        """Return once the memory is free; tags that are released already stay so.

        Raises MemoryNotFreed when it is not free within ``--offload-timeout``.
        """
        for tag in [tag for tag in reversed(TAGS) if tag in tags and tag not in self._released]:
            tensors = self._own(tag)
            if self._settings.check_offload_equal:
                self._checksums[tag] = _checksums(tensors)
            before = self._accelerator.memory_info()
            nbytes = self._copy(tag).release(tensors)
            self._released.add(tag)
            wait_until_freed(self._accelerator, before, nbytes, self._settings.offload_timeout, _SIDE)

    def resume(self, tags: Iterable[Tag] = TAGS) -> None:
        """Have it back, bit for bit. Raises MemoryNotFreed when there is no room within ``--offload-timeout``."""
        for tag in [tag for tag in TAGS if tag in tags and tag in self._released]:
            copy = self._copies[tag]
            wait_for_room(self._accelerator, copy.nbytes, self._settings.offload_timeout, _SIDE)
            copy.resume()
            self._released.remove(tag)
            if tag in self._checksums:
                self._compare(tag, self._checksums.pop(tag))

    @contextmanager
    def present(self, *tags: Tag) -> Iterator[None]:
        """Have these there for a while: what is released now is released again afterwards."""
        away = [tag for tag in self.released if tag in tags]
        self.resume(away)
        try:
            yield
        except CheckpointWriteError:  # the run goes on
            self.release(away)
            raise
        self.release(away)

    def close(self) -> None:
        for copy in self._copies.values():
            copy.close()

    def _own(self, tag: Tag) -> list[torch.Tensor]:
        """The tensors of a tag, without what an earlier tag moves. Tensors elsewhere than on the device stay there."""
        held = self._held()
        device = self._accelerator.device().type
        earlier = {s._cdata for other in TAGS[: TAGS.index(tag)] for s in storages_of(held[other])}
        return [
            tensor
            for tensor in held[tag]
            if tensor.device.type == device and tensor.untyped_storage()._cdata not in earlier
        ]

    def _copy(self, tag: Tag) -> HostCopy:
        if tag not in self._copies:
            given = self._settings.offload_dir  # of the first machine; on another it may not be there
            directory = Path(given) if given is not None and Path(given).is_dir() else None
            self._copies[tag] = HostCopy(self._accelerator, directory)
        return self._copies[tag]

    def _compare(self, tag: Tag, before: list[str]) -> None:
        after = _checksums(self._own(tag))
        different = sum(one != other for one, other in zip(before, after, strict=True))
        if different:
            raise RunError(
                f"--check-offload-equal: {different} of {len(after)} blocks of the trainer's memory ({tag}) came back "
                "from the host with other values than they had"
            )


def held_tensors(optimizer: PolicyOptimizer, models: Iterable[torch.nn.Module]) -> dict[Tag, list[torch.Tensor]]:
    """Everything of size that outlives a training step. ``models``: the trained one, and others beside it."""
    weights: list[torch.Tensor] = []
    for model in models:
        weights += model.parameters()
        weights += model.buffers()
    buffers = [*optimizer.model.buffers, *optimizer.model.expert_parallel_buffers]
    weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    rest: list[torch.Tensor] = [buffer.grad_data for buffer in buffers]
    rest += optimizer.state_tensors()
    rest += [weight.grad for weight in [*weights, *rest] if weight.grad is not None]
    return {"weights": weights, "optimizer": rest}


def _checksums(tensors: Iterable[Any]) -> list[str]:
    return [fast_checksum(bytes_in(storage)) for storage in storages_of(tensors)]
