"""``--data-source-path``: prompts from a class of the user's, in the place of ``DataSource``."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from samples.config import DataConfig
from samples.encoding import encode_prompt
from samples.errors import InputError, RunError, raised_at
from samples.loading import load_function
from samples.sample import Group, Sample, Status
from samples.source import SourceCounts

FLAG = "--data-source-path"
METHODS = ("get_samples", "state_dict", "load_state_dict")
_REMEMBERED = 1 << 12  # groups of which every sample is known as it was drawn
_TOO_LONG_IN_A_ROW = 1000


class CustomDataSource:
    """Gives what the user's source gives, numbered and encoded, and keeps what is returned.

    The user's class is made once with ``args`` (the prompt settings under their flag names, ``seed``,
    ``n_samples_per_prompt``, ``max_prompt_len``) and has ``get_samples(n)``, which returns up to ``n`` groups (lists of
    samples; fewer or none: it has ended), ``state_dict()``, which JSON can hold, and ``load_state_dict(state)``.
    """

    def __init__(
        self,
        factory: Any,
        config: DataConfig,
        tokenizer: Any,
        *,
        path: str,
        seed: int,
        n_samples_per_prompt: int,
        max_prompt_len: int,
    ) -> None:
        """``factory`` is the user's class, which ``path`` names. Raises InputError for one that is no source."""
        self._path = path
        self._told = f"{FLAG} {path}"
        self._config = config
        self._tokenizer = tokenizer
        self._max_prompt_len = max_prompt_len
        self._group_size = n_samples_per_prompt
        own = {"seed": seed, "n_samples_per_prompt": n_samples_per_prompt, "max_prompt_len": max_prompt_len}
        args = SimpleNamespace(**(config.model_dump() | own))
        self._source = self._made(factory, args)
        self._waiting: deque[Group] = deque()
        self._drawn: OrderedDict[int, Group] = OrderedDict()  # as they were drawn, by group index
        self._next_group = self._next_sample = 0
        self._longest = self._too_long = 0

    @property
    def counts(self) -> SourceCounts:
        return SourceCounts(self._next_group, 0, self._too_long, self._longest)

    def skipped(self) -> list[str]:
        """Nothing is known of prompts ahead."""
        return []

    def next_groups(self, n: int) -> list[Group]:
        """Up to ``n`` groups, returned ones first; fewer when the user's source has ended. Raises RunError when it
        fails or gives what cannot be used."""
        fresh: list[Group] = []
        skipped = 0
        while (wanted := n - len(self._waiting) - len(fresh)) > 0:
            given = self._call("get_samples", wanted)
            groups = self._checked(given, wanted)
            if not groups:
                break
            usable = [group for group in groups if self._prepared(group)]
            skipped = 0 if usable else skipped + len(groups)
            if skipped >= _TOO_LONG_IN_A_ROW:
                raise InputError(
                    f"{self._told}: {skipped} prompts in a row have more than {self._max_prompt_len} tokens "
                    "(--rollout-max-prompt-len, or what --rollout-max-response-len leaves of the context)"
                )
            fresh += [self._numbered(group) for group in usable]
        returned = [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]
        return returned + fresh

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None:
        """As ``DataSource.return_groups``; a group begins again as the user's source gave it."""
        waiting = {group[0].group_index for group in self._waiting}
        for group in groups:
            index = group[0].group_index if group else None
            if index in waiting:
                raise ValueError(f"group {index} was returned twice")
            if index is None or not 0 <= index < self._next_group:
                raise ValueError(f"group {index} was not drawn from this source")
            waiting.add(index)
        self._waiting.extendleft(reversed([self._fresh(group) if reset else list(group) for group in groups]))

    def state_dict(self, in_flight: Iterable[Group] = ()) -> dict[str, Any]:
        """The user's own state, and the groups that are to be drawn first."""
        custom = self._call("state_dict")
        packed = [self._fresh(group) for group in in_flight] + list(self._waiting)
        state = {
            "path": self._path,
            "custom": custom,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "waiting": [[sample.to_dict() for sample in group] for group in packed],
            "begin_again": [
                [sample.to_dict() for sample in self._drawn[index]]
                for group in packed
                if (index := group[0].group_index) in self._drawn and index is not None
            ],
        }
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{self._told}: what state_dict() or a sample's metadata holds cannot be saved as JSON ({error})"
            ) from error
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "custom" not in state:
            raise InputError(f"{self._told}: the checkpoint was saved without {FLAG}; resume without it, or start anew")
        if state["path"] != self._path:
            raise InputError(
                f"{self._told}: the checkpoint's place in the prompts is that of {FLAG} {state['path']}; resume with "
                "the same, or start anew"
            )
        self._call("load_state_dict", state["custom"])
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._waiting = deque([Sample.from_dict(values) for values in group] for group in state["waiting"])
        self._drawn = OrderedDict(
            (group[0]["group_index"], [Sample.from_dict(values) for values in group]) for group in state["begin_again"]
        )

    def _made(self, factory: Any, args: SimpleNamespace) -> Any:
        try:
            source = factory(args)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self._told} cannot be made with (args): {type(error).__name__}: {error}{raised_at(error)}"
            ) from error
        missing = [name for name in METHODS if not callable(getattr(source, name, None))]  # of the user's class
        if missing:
            raise InputError(
                f"{self._told}: lacks {', '.join(missing)}; a data source has get_samples(n), state_dict() and "
                "load_state_dict(state)"
            )
        return source

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._source, name)(*arguments)
        except (Exception, SystemExit) as error:
            raise RunError(f"{self._told}.{name} failed: {type(error).__name__}: {error}{raised_at(error)}") from error

    def _checked(self, given: Any, wanted: int) -> list[Group]:
        fits = isinstance(given, list) and all(
            isinstance(group, list) and group and all(isinstance(sample, Sample) for sample in group) for group in given
        )
        if not fits:
            raise RunError(
                f"{self._told}.get_samples({wanted}) returned {str(given)[:120]}: expected a list of groups, each a "
                "list of at least one Sample"
            )
        if len(given) > wanted:
            raise RunError(f"{self._told}.get_samples({wanted}) returned {len(given)} groups, more than asked for")
        return given

    def _prepared(self, group: Group) -> bool:
        """Encode prompts that have no tokens yet; False for a group with one that is too long."""
        for sample in group:
            if not sample.tokens:
                chat = self._config.apply_chat_template
                sample.tokens = encode_prompt(self._tokenizer, sample.prompt, apply_chat_template=chat)
            if not sample.tokens:
                raise RunError(f"{self._told}: the tokenizer makes no token of the prompt {str(sample.prompt)[:80]!r}")
        longest = max(len(sample.tokens) - sample.response_length for sample in group)
        self._longest = max(self._longest, longest)
        self._too_long += longest > self._max_prompt_len
        return longest <= self._max_prompt_len

    def _numbered(self, group: Group) -> Group:
        for sample in group:
            sample.group_index, sample.index = self._next_group, self._next_sample
            sample.status = Status.PENDING
            self._next_sample += 1
        self._drawn[self._next_group] = copy.deepcopy(group)
        self._next_group += 1
        if len(self._drawn) > _REMEMBERED:
            self._drawn.popitem(last=False)
        return group

    def _fresh(self, group: Group) -> Group:
        index = group[0].group_index
        assert index is not None
        if index in self._drawn:
            return copy.deepcopy(self._drawn[index])
        # Of a run that was resumed, or long ago: the first sample, as it was drawn, stands for its group.
        first = group[0]
        assert first.index is not None
        copies = [copy.deepcopy(first) for _ in range(self._group_size)]
        for place, sample in enumerate(copies):
            sample.index = first.index + place
        return copies


def open_custom_source(
    config: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    n_samples_per_prompt: int,
    max_prompt_len: int,
    user_code_dir: str | None,
) -> CustomDataSource:
    """The source of ``--data-source-path``. Raises InputError for a class that is not there or is no source."""
    assert config.data_source_path is not None
    return CustomDataSource(
        load_function(config.data_source_path, FLAG, user_code_dir),
        config,
        tokenizer,
        path=config.data_source_path,
        seed=seed,
        n_samples_per_prompt=n_samples_per_prompt,
        max_prompt_len=max_prompt_len,
    )
