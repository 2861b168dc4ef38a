"""``--rollout-function-path``: the user's own way from the prompts to answered groups, one call a sampling round.

What comes back goes through the same boundary as our own groups: sample hooks, then rewards where there is none yet,
then the dynamic-sampling filter. Nothing that was drawn is lost: what the function neither hands over nor puts back is
put back for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from observability.rollout_metrics import leaves_of
from rollout.custom.contracts import ROLLOUT
from rollout.custom.errors import CustomFunctionError, failed
from rollout.engines.protocol import SamplingParams
from samples.cancellation import is_cancelled
from samples.sample import Group, Sample, Status
from samples.signatures import UserFunction, load_user_function


class PromptSource(Protocol):
    def next_groups(self, n: int) -> list[Group]: ...

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None: ...


class DrawingSource:
    """The ``data_source`` of a rollout function; under slime's names. It remembers what was drawn."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self.drawn: dict[int, Sample] = {}  # by group index, the first sample as it was drawn
        self.ended = False  # there were fewer than asked for

    def get_samples(self, num_samples: int) -> list[Group]:
        """Up to ``num_samples`` groups of pending samples; fewer when the prompts have come to their end."""
        groups = self._source.next_groups(num_samples)
        self.ended = self.ended or len(groups) < num_samples
        self.drawn |= {_index(group): replace(group[0]) for group in groups}
        return groups

    def add_samples(self, groups: Sequence[Group]) -> None:
        """Put groups back, to be the first drawn next; unfinished responses go on from where they are.

        Only groups that this call drew: any other has been trained on, or is back already, and ValueError says so.
        """
        for index in map(_index, groups):
            if self.drawn.pop(index, None) is None:
                raise ValueError(
                    f"group {index} was put back, but this call did not draw it, or has put it back already"
                )
        for group in groups:
            for sample in leaves_of(group):
                if sample.status is Status.ABORTED:
                    sample.status = Status.PENDING
        self._source.return_groups(groups)

    def give_back_rest(self) -> int:
        """Put back what is left, to begin again; how many groups that was."""
        left = [[self.drawn[index]] for index in sorted(self.drawn)]
        self.drawn.clear()
        self._source.return_groups(left, reset=True)
        return len(left)


@dataclass(frozen=True)
class RolloutContext:
    """What a rollout function has to work with. ``generate(group, sampling_params=None)`` has the engine (or
    ``--custom-generate-function-path``) answer a group, in place, and returns it; calls run side by side."""

    generate: Callable[..., Awaitable[Group]]
    tokenizer: Any
    sampling_params: SamplingParams


class RolloutFunction:
    """Calls the user's function once a round and checks what comes back."""

    def __init__(self, function: UserFunction, args: Any, source: PromptSource) -> None:
        self._function = function
        self._args = args
        self._source = source

    @classmethod
    def load(cls, path: str, args: Any, source: PromptSource, user_code_dir: str | None) -> RolloutFunction:
        """Raises InputError for a function that cannot be called as a rollout function."""
        return cls(load_user_function(path, ROLLOUT, user_code_dir), args, source)

    async def __call__(
        self, rollout_id: int, context: RolloutContext
    ) -> tuple[list[Group], dict[int, Sample], int, bool]:
        """The answered groups of one round, the first samples of those that were drawn (by group index), how many
        drawn groups were put back because the function forgot them, and whether the prompts have come to their end.
        Raises CustomFunctionError."""
        source = DrawingSource(self._source)
        told = f"{ROLLOUT.flag} {self._function.path}"
        try:
            returned = await self._function.call(self._args, rollout_id, source, context=context, evaluation=False)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            raise failed(ROLLOUT.flag, self._function.path, f"rollout {rollout_id}", error) from error
        groups = checked_rollout(returned, f"{told} returned")
        if not groups and not source.ended:
            raise CustomFunctionError(f"{told} returned no group for rollout {rollout_id}, and there are prompts left")
        for index in map(_index_or_none, groups):
            if index is not None and index not in source.drawn:
                raise CustomFunctionError(
                    f"{told} returned group {index}, which this call did not draw or has put back: it would be trained "
                    "on twice; groups that come from elsewhere have no group_index"
                )
        first = {index: source.drawn.pop(index) for group in groups if (index := _index_or_none(group)) in source.drawn}
        return groups, first, source.give_back_rest(), source.ended


def checked_rollout(returned: Any, told: str) -> list[Group]:
    """The groups that a rollout function may return: a list of groups of finished samples, or, as slime's, an object
    with such a list as ``samples``."""
    groups = returned if isinstance(returned, list) else getattr(returned, "samples", None)  # of the user's
    if not isinstance(groups, list):
        raise CustomFunctionError(
            f"{told} {type(returned).__name__}: expected a list of groups, each a list of samples"
        )
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in _members(group)):
            raise CustomFunctionError(f"{told} a list with {str(group)[:80]}: expected groups, each a list of samples")
        for sample in leaves_of(group):
            if sample.status in (Status.PENDING, Status.ABORTED):
                raise CustomFunctionError(
                    f"{told} sample {sample.index} (group {sample.group_index}), which is {sample.status.value}: hand "
                    "over finished groups, and put the others back with data_source.add_samples([group])"
                )
        index = _index_or_none(group)
        if index is not None and index in seen:
            raise CustomFunctionError(f"{told} group {index} twice: it would be trained on twice")
        if index is not None:
            seen.add(index)
    samples: set[int] = set()
    for sample in leaves_of(groups):
        if id(sample) in samples:
            raise CustomFunctionError(f"{told} the same sample twice: it would be trained on twice (use copy.deepcopy)")
        samples.add(id(sample))
    return groups


def _members(group: Group) -> list[Any]:
    return [leaf for member in group for leaf in (member if isinstance(member, list) else [member])]


def _index_or_none(group: Group) -> int | None:
    return next(leaves_of(group)).group_index


def _index(group: Group) -> int:
    index = _index_or_none(group)
    if index is None:
        raise ValueError("a group without a group index was not drawn from this source")
    return index
