"""What every collector does, whenever it generates: groups for a step, places between steps, and its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.collectors.output import RolloutOutput
from samples.sample import Group, Sample
from samples.source import SourceCounts


class GroupSource(Protocol):
    """Where groups are drawn from; ``samples.DataSource`` is one. ``next_groups`` gives fewer than asked for only when
    nothing is left, until groups are returned."""

    @property
    def counts(self) -> SourceCounts: ...

    def next_groups(self, n: int) -> list[Group]: ...

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None: ...

    def state_dict(self, in_flight: Iterable[Group] = ()) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class WaitingGroup:
    """A finished group that no step has trained on yet. ``version``: the oldest weights that a token of it came from;
    ``first``: its first sample as it was drawn, from which a source can give the group again."""

    group: Group
    version: int
    first: Sample

    @property
    def index(self) -> int:
        assert self.first.group_index is not None
        return self.first.group_index


@dataclass(frozen=True)
class CollectorState:
    """A collector at one moment. A source restored from ``source`` draws again what was in flight.

    ``facts``, which JSON can hold, says of which ``mode`` it is; ``waiting`` are the groups that are paid for.
    """

    source: dict[str, Any]
    facts: dict[str, Any]
    waiting: list[WaitingGroup] = field(default_factory=list)


class Collector(Protocol):
    """Everything runs on one event loop; steps are collected one after the other."""

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """Groups for step ``rollout_id``; ``ended`` when the source has none left for it."""
        ...

    async def settle(self) -> None:
        """Return once the engine may take new weights: what must not see them is done."""
        ...

    def weights_updated(self, version: int) -> None:
        """The engine answers with the weights of ``version`` from now on."""
        ...

    async def state(self) -> CollectorState:
        """Between two steps: all that was drawn, and where it is."""
        ...

    def restore(self, state: CollectorState) -> None:
        """Go on from ``state``, in a new collector. Its source is restored here too."""
        ...

    async def close(self) -> None:
        """End what runs, within a bounded time. May be called twice."""
        ...


def restore_from_another_mode(state: CollectorState, source: GroupSource) -> None:
    """Restore ``source``, and have the prompts of the finished groups drawn again: their responses are given up.

    Groups of a rollout function's own, numbered below zero, have no prompt in the source.
    """
    source.load_state_dict(state.source)
    source.return_groups([[entry.first] for entry in state.waiting if entry.index >= 0], reset=True)
