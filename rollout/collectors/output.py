"""What a collector hands on."""

from __future__ import annotations

from dataclasses import dataclass, field

from samples.sample import Group


@dataclass(frozen=True)
class RolloutOutput:
    """The groups of one rollout to train on, in the order of their group index, and what was measured on the way."""

    rollout_id: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    sampled: list[Group] = field(default_factory=list)  # every group that was scored, those of ``groups`` included
    ended: bool = False  # the source had no prompt left, and no group waited: there is no such step
