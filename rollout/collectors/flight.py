"""One group on its way: what was drawn, under which weights it began, and the task that takes it through."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, replace

from observability.rollout_metrics import leaves_of
from samples.sample import Group, Sample, Status


@dataclass(eq=False)
class Flight:
    """A group that was dispatched and has not landed. ``version`` is that of its oldest token, or of the weights that
    answered when it was dispatched: at most that of any token to come."""

    group: Group
    index: int
    version: int
    rollout_id: int
    first: Sample  # as it was drawn, before generation and hooks change the group
    task: asyncio.Task[None] | None = None
    stopped: bool = False  # it was under way when all was told to stop for new weights

    @classmethod
    def begin(cls, group: Group, version: int, rollout_id: int) -> Flight:
        index = group[0].group_index
        assert index is not None
        return cls(group, index, oldest_version(group, version), rollout_id, as_drawn(group[0]))

    @property
    def can_go_on(self) -> bool:
        """Whether no response fanned out into several samples, of which a source could not begin again."""
        return all(isinstance(member, Sample) for member in self.group)

    @property
    def aborted(self) -> bool:
        return any(sample.status is Status.ABORTED for sample in leaves_of(self.group))


def as_drawn(sample: Sample) -> Sample:
    """A copy that neither generation nor hooks change."""
    return replace(sample, metadata=copy.deepcopy(sample.metadata))


def oldest_version(group: Group, unknown: int) -> int:
    """The oldest weights that a token of ``group`` came from; ``unknown`` where no response says.

    Those that an engine began with (-1) are as old as the first that are handed over.
    """
    known = [
        max(0, sample.weight_version)
        for sample in leaves_of(group)
        if sample.response_length and sample.weight_version is not None
    ]
    return min(known, default=unknown)


def staleness_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Weight versions between the oldest token of a group, and each single token, and the weights ``version`` that are
    trained on it; and the share of responses that several versions wrote."""
    ages = [version - oldest_version(group, version) for group in groups]
    if not ages:
        return {}
    metrics = {"rollout/async/staleness/mean": sum(ages) / len(ages), "rollout/async/staleness/max": float(max(ages))}
    written = [sample.version_spans() or [] for sample in leaves_of(groups)]
    tokens = [(version - max(0, of), count) for spans in written for of, count in spans]
    if tokens:
        total = sum(count for _, count in tokens)
        metrics["rollout/async/token_staleness/mean"] = sum(age * count for age, count in tokens) / total
        metrics["rollout/async/token_staleness/max"] = float(max(age for age, _ in tokens))
        metrics["rollout/async/mixed_versions_ratio"] = sum(len(spans) > 1 for spans in written) / len(written)
    return metrics
