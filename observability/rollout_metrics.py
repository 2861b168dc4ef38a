"""What one rollout sampled, as numbers. Training's numbers come from the trainer; the two never mix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from samples.sample import Group, Sample, Status

MAX_NAMES = 32
OTHER = "other"


class BoundedNames:
    """Names that become part of metric keys: cleaned, and at most ``limit`` in the life of a run; the rest is "other".

    Keep one for a run, so that a name that has a key keeps it.
    """

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def key(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known[name] = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:64] or "unnamed"
        return self._known[name]


class RolloutMetrics:
    """Computes one rollout's metrics; holds only the names of sources and filter reasons that it has seen."""

    def __init__(self, reward_key: str | None = None, max_names: int = MAX_NAMES) -> None:
        self._reward_key = reward_key
        self._sources = BoundedNames(max_names)
        self._reasons = BoundedNames(max_names)

    def __call__(
        self,
        groups: Sequence[Group],
        *,
        dynamic_filter: Mapping[str, float] | None = None,
        drop_reasons: Mapping[str, float] | None = None,
        counters: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Metrics of ``groups``, which must be all that were sampled, before any filter.

        ``dynamic_filter`` (groups kept, dropped, ...) goes under ``rollout/dynamic_filter/``, ``drop_reasons``, which
        come from user code, under ``rollout/dynamic_filter/drop/``, and ``counters`` of other parts (reward/retries,
        ...) under ``rollout/``. A group may hold nested lists of samples. A mean over nothing is left out: a key that
        is present is a number.
        """
        leaves = [list(leaves_of(group)) for group in groups]
        everything = list(chain.from_iterable(leaves))
        metrics: dict[str, float] = {
            "rollout/num_groups": len(leaves),
            "rollout/num_samples": len(everything),
            "rollout/response_tokens": sum(sample.response_length for sample in everything),
        }
        if everything:
            metrics |= self._of_samples(everything, "rollout/")
            metrics["rollout/zero_spread_ratio"] = self._zero_spread_ratio(leaves)
            metrics |= self._by_source(everything)
        for name, count in (dynamic_filter or {}).items():
            metrics[f"rollout/dynamic_filter/{name}"] = count
        for reason, count in (drop_reasons or {}).items():
            key = f"rollout/dynamic_filter/drop/{self._reasons.key(reason)}"
            metrics[key] = metrics.get(key, 0) + count
        for name, count in (counters or {}).items():
            metrics[f"rollout/{name}"] = count
        return metrics

    def _of_samples(self, group: Sequence[Sample], prefix: str) -> dict[str, float]:
        lengths = [sample.response_length for sample in group]
        rewards = [sample.reward_value(self._reward_key) for sample in group if sample.reward is not None]
        metrics = {
            f"{prefix}response_len/mean": sum(lengths) / len(lengths),
            f"{prefix}response_len/min": min(lengths),
            f"{prefix}response_len/max": max(lengths),
            f"{prefix}truncated_ratio": _share(group, Status.TRUNCATED),
            f"{prefix}aborted_ratio": _share(group, Status.ABORTED),
            f"{prefix}failed_ratio": _share(group, Status.FAILED),
        }
        if rewards:
            metrics[f"{prefix}raw_reward"] = _mean(rewards)
        return metrics

    def _by_source(self, everything: Iterable[Sample]) -> dict[str, float]:
        by_name: dict[str, list[Sample]] = {}
        for sample in everything:
            if sample.source is not None:
                by_name.setdefault(self._sources.key(sample.source), []).append(sample)
        metrics: dict[str, float] = {}
        for name, group in sorted(by_name.items()):
            metrics[f"rollout/source/{name}/num_samples"] = len(group)
            metrics |= self._of_samples(group, f"rollout/source/{name}/")
        return metrics

    def _zero_spread_ratio(self, groups: Sequence[Sequence[Sample]]) -> float:
        """Share of the scored groups whose rewards are all equal: a group-normalised advantage is zero there."""
        scored = [
            {sample.reward_value(self._reward_key) for sample in group if sample.reward is not None} for group in groups
        ]
        scored = [rewards for rewards in scored if rewards]
        return sum(len(rewards) == 1 for rewards in scored) / len(scored) if scored else 0.0


def rollout_metrics(
    groups: Sequence[Group],
    *,
    reward_key: str | None = None,
    dynamic_filter: Mapping[str, float] | None = None,
    drop_reasons: Mapping[str, float] | None = None,
    counters: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Metrics of one rollout by itself; a run keeps a ``RolloutMetrics``, so that its keys stay bounded."""
    of = RolloutMetrics(reward_key)
    return of(groups, dynamic_filter=dynamic_filter, drop_reasons=drop_reasons, counters=counters)


def leaves_of(group: Iterable[Sample | Iterable[Sample]]) -> Iterator[Sample]:
    """The samples of a group, which may hold nested lists."""
    for member in group:
        if isinstance(member, Sample):
            yield member
        else:
            yield from leaves_of(member)


def _share(group: Sequence[Sample], status: Status) -> float:
    return sum(sample.status is status for sample in group) / len(group)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
