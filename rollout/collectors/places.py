"""Where every drawn group is: with its source, in flight, waiting, or gone for a reason that is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from rollout.collectors.base import GroupSource, WaitingGroup
from rollout.collectors.flight import Flight, oldest_version
from rollout.collectors.staleness import fits
from rollout.collectors.totals import Totals
from samples.sample import Group, Sample

Cause = Literal["aborted", "retried", "cut_short"]


class Places:
    """The books of the fully asynchronous collector. No method awaits, so no group is ever between two places.

    ``batch`` groups make a step; a group is trained on at most ``bound`` weight versions after its oldest token. The
    pool are the groups in flight or waiting that count for the current step's fallback: all that are there when a step
    is taken and what is dispatched then, but not what later takes the place of dropped ones, unless it is needed.
    """

    def __init__(self, source: GroupSource, *, batch: int, bound: int) -> None:
        self._source = source
        self._batch = batch
        self._bound = bound
        self.version = 0
        self.training = False  # a step was taken, and its weights have not come
        self.in_flight: dict[int, Flight] = {}
        self.waiting: list[WaitingGroup] = []
        self.totals = Totals()
        self._attempts: dict[int, int] = {}  # failures of groups that are not finished, by index
        self._aborts: dict[int, int] = {}  # the same, of aborts that nobody asked for
        self._failed: list[Sample] = []  # first samples of groups that failed once too often
        self._pool: set[int] = set()
        self._replacements = 0  # dropped groups whose place is free

    @property
    def room(self) -> int:
        """Groups that may be dispatched before the last of them could be too old; negative when there are too many."""
        ahead = self._bound if self.training else self._bound + 1
        return self._batch * ahead - self.outstanding

    @property
    def outstanding(self) -> int:
        return len(self.in_flight) + len(self.waiting)

    def draw(self, n: int) -> tuple[list[Group], bool]:
        """Up to ``n`` groups of the source, each in time for a step; and whether the source had no more.

        One whose first tokens are too old for that goes back to start from its prompt, and comes with the next draw.
        """
        groups = list(self._source.next_groups(n))
        fresh = [group for group in groups if self._may_go_on(group)]
        if len(fresh) < len(groups):
            kept = set(map(id, fresh))
            self._source.return_groups([group[:1] for group in groups if id(group) not in kept], reset=True)
        return fresh, len(groups) < n

    def dispatch(self, group: Group, rollout_id: int) -> Flight:
        flight = Flight.begin(group, self.version, rollout_id)
        self.in_flight[flight.index] = flight
        self.totals.drawn += 1
        replaces = self._replacements > 0
        self._replacements -= replaces
        if not replaces or len(self._pool) < self._batch:
            self._pool.add(flight.index)
        return flight

    def has(self, flight: Flight) -> bool:
        return self.in_flight.get(flight.index) is flight

    def remaining(self, flight: Flight) -> int:
        """Groups that can still serve the current step, ``flight``'s included."""
        return len(self._pool | {flight.index})

    def keep(self, flight: Flight) -> None:
        self._leave(flight)
        self.waiting.append(WaitingGroup(flight.group, oldest_version(flight.group, flight.version), flight.first))

    def drop(self, flight: Flight) -> None:
        self._leave(flight)
        self._pool.discard(flight.index)
        self._replacements += 1
        self.totals.dropped += 1

    def give_back(self, flight: Flight, cause: Cause, *, reset: bool = True) -> None:
        """To the front of the source's line: to start from the prompt, or to go on where it stopped."""
        self._leave(flight)
        self._count_return(flight.index, cause)
        self._source.return_groups([[flight.first] if reset else flight.group], reset=reset)

    def try_again(self, flight: Flight, most: int) -> bool:
        """Give back a group that failed, unless it did more than ``most`` times: then it is gone, and False."""
        attempts = self._attempts.get(flight.index, 0) + 1
        if attempts <= most:
            self.give_back(flight, "retried")
            self._attempts[flight.index] = attempts
            return True
        self.fail(flight)
        return False

    def aborted_by_itself(self, flight: Flight) -> int:
        """How often the group now was aborted although nothing was told to stop."""
        self._aborts[flight.index] = self._aborts.get(flight.index, 0) + 1
        return self._aborts[flight.index]

    def fail(self, flight: Flight) -> None:
        self._leave(flight)
        self._failed.append(flight.first)
        self._pool.discard(flight.index)
        self._attempts.pop(flight.index, None)
        self.totals.failed += 1

    def finished(self, flight: Flight) -> None:
        """What failed before has succeeded."""
        self._attempts.pop(flight.index, None)
        self._aborts.pop(flight.index, None)

    def oldest_first(self) -> list[WaitingGroup]:
        return sorted(self.waiting, key=lambda entry: (entry.version, entry.index))

    def in_time(self, more: Iterable[int] = ()) -> bool:
        """Whether all that is outstanding, and groups of the versions ``more``, can be trained on in time."""
        versions = [entry.version for entry in self.waiting]
        return self._fits([*versions, *more], self.version + self.training)

    def may_take(self) -> bool:
        """Whether what a step now leaves behind can be trained on in time."""
        return self._fits([entry.version for entry in self.oldest_first()[self._batch :]], self.version + 1)

    def take(self) -> list[WaitingGroup]:
        """A step's groups; the others are those of the next step."""
        ordered = self.oldest_first()
        taken, self.waiting = ordered[: self._batch], ordered[self._batch :]
        self.totals.trained += len(taken)
        self.training, self._replacements = True, 0
        self._pool = {*self.in_flight, *(entry.index for entry in self.waiting)}
        return taken

    def take_dropped(self, count: int) -> None:
        """``count`` groups that were dropped are trained on all the same."""
        self.totals.dropped -= count
        self.totals.trained += count

    def return_stale(self) -> None:
        """Give back groups for which a run that was resumed has a smaller bound."""
        stale: list[WaitingGroup] = []
        while self.waiting and not self.in_time():
            stale.append(self.oldest_first()[0])
            self.waiting.remove(stale[-1])
            self._count_return(stale[-1].index, "stale")
        self._source.return_groups([[entry.first] for entry in stale], reset=True)

    def to_draw_again(self) -> list[Sample]:
        """First samples of the groups that a run resumed from here begins anew: in flight, or failed once too often.

        Of the latter none is lost with the run that it ended: what made it fail may be mended by then.
        """
        return [self.in_flight[index].first for index in sorted(self.in_flight)] + self._failed

    def facts(self) -> dict[str, Any]:
        """What a checkpoint holds of the books besides the groups. What is drawn again counts as returned."""
        totals = self.totals.to_dict()
        totals["returned"] += len(self.in_flight) + len(self._failed)
        totals["cut_short"] += len(self.in_flight) + len(self._failed)
        totals["failed"] -= len(self._failed)
        return {"totals": totals, "attempts": [[index, count] for index, count in sorted(self._attempts.items())]}

    def restore(self, facts: dict[str, Any], waiting: list[WaitingGroup]) -> None:
        self.waiting = list(waiting)
        self._pool = {entry.index for entry in waiting}
        self.totals = Totals.from_dict(facts["totals"])
        self._attempts = dict(facts["attempts"])

    def _may_go_on(self, group: Group) -> bool:
        oldest = oldest_version(group, self.version)
        return oldest == self.version or self.in_time([oldest])

    def _fits(self, waiting: list[int], next_version: int) -> bool:
        flying = [flight.version for flight in self.in_flight.values()]
        return fits([*waiting, *flying], next_version=next_version, batch=self._batch, bound=self._bound)

    def _count_return(self, index: int, cause: str) -> None:
        self._pool.discard(index)
        self.totals.returned += 1
        setattr(self.totals, cause, getattr(self.totals, cause) + 1)

    def _leave(self, flight: Flight) -> None:
        del self.in_flight[flight.index]
