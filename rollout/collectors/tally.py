"""What happened to the groups of one rollout of the synchronous collector."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from filters.output import UNUSABLE
from rollout.collectors.base import WaitingGroup
from samples.sample import Group

_NAMED = 8


def described(reasons: Counter[str]) -> str:
    """``7 zero_std_0.0, 2 too_long``, for a message: the most frequent by name."""
    named = sorted(reasons.most_common(_NAMED))
    told = [f"{count} {reason[:64]}" for reason, count in named]
    if len(reasons) > len(named):
        rest = reasons.total() - sum(count for _, count in named)
        told.append(f"{rest} for {len(reasons) - len(named)} other reasons")
    return ", ".join(told) or "none"


@dataclass
class Tally:
    """Counts, and the groups that passed or were dropped."""

    sampled: list[Group] = field(default_factory=list)
    kept: list[WaitingGroup] = field(default_factory=list)
    dropped: list[WaitingGroup] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    carried: int = 0  # kept groups that waited since an earlier rollout
    surplus: int = 0
    aborted: int = 0
    forgotten: int = 0
    fallback: int = 0
    reward_seconds: float = 0.0
    ended: bool = False  # the source had nothing left
    _unusable: set[int] = field(default_factory=set)

    def drop(self, entry: WaitingGroup, reason: str) -> None:
        self.dropped.append(entry)
        self.reasons[reason] += 1
        if not entry.group or reason in UNUSABLE:
            self._unusable.add(id(entry))

    def fit_for_fallback(self) -> list[WaitingGroup]:
        """Dropped groups that can be trained on at all, by index."""
        return sorted((e for e in self.dropped if id(e) not in self._unusable), key=lambda entry: entry.index)

    def describe(self) -> str:
        told = f"{len(self.sampled)} groups drawn in {self.rounds} rounds, {len(self.kept)} kept, "
        aborted = f", {self.aborted} aborted" if self.aborted else ""
        return f"{told}{len(self.dropped)} dropped ({described(self.reasons)}){aborted}"

    def counts(self, trained: int) -> dict[str, int]:
        """Metrics, under ``rollout/dynamic_filter/``."""
        return {
            "rounds": self.rounds,
            "groups_sampled": len(self.sampled),
            "groups_kept": trained,
            "groups_dropped": len(self.dropped),
            "groups_surplus": self.surplus,
            "groups_by_fallback": self.fallback,
            "groups_carried_over": self.carried,
            "groups_aborted": self.aborted,
            "groups_put_back": self.forgotten,
        }
