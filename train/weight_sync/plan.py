"""What the two ends of a weight channel have to know, and say to each other; plain data, sent between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Channel: TypeAlias = Literal["in_process", "tensor", "distributed", "server_group", "disk", "disk_delta"]


@dataclass(frozen=True)
class UpdatePlan:
    """How weights travel from the trainer's first rank to the rollout worker.

    ``directory``: where files go: weights of the disk channels, shared memory where ``/dev/shm`` is too small, and the
    store through which a group's ranks find each other. ``one_machine``: whether all workers are known to be on one.
    ``server_group`` is the trainer's first rank and all ranks of the SGLang servers.
    """

    channel: Channel
    bucket_bytes: int
    timeout: float  # seconds
    directory: str
    one_machine: bool = True
    keeps_weights: bool = False  # ``server_group``: whether what was sent is kept, for a server that is started again
    retries: int = 0  # of an update that failed, with everything

    @property
    def at_once(self) -> bool:
        """Whether all weights are written before the other end takes any."""
        return self.channel in ("disk", "disk_delta")


@dataclass(frozen=True)
class Offer:
    """What the sending end has opened for the other to find. ``word``: what is written at ``place``."""

    place: str
    word: str


@dataclass(frozen=True)
class Summary:
    """Of a whole update, for the other end to compare with what it got.

    ``digest``: of all tensors (None: they did not leave the process). ``nbytes``: what travelled. ``directory``: where
    it lies, on the disk channels.
    """

    version: int
    tensors: int
    nbytes: int
    digest: str | None
    directory: str | None = None


@dataclass(frozen=True)
class Manifest:
    """``weights.json`` of an update on disk: checksums by tensor. ``kept``: those that are as in version ``base``."""

    version: int
    base: int | None
    tensors: dict[str, str]
    kept: dict[str, str] = field(default_factory=dict)
