"""Where groups of samples come from: the prompts in order, and a cursor that can be saved and restored."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samples.config import TRAINING_FLAGS, DataConfig, PromptFlags
from samples.encoding import encode_prompt
from samples.errors import InputError
from samples.prompts import PromptSet
from samples.rows import Prompt
from samples.sample import Group, Sample
from samples.shuffle import epoch_order

_STATE_VERSION = 1
_LOOKED_AT = 256  # prompts that are encoded ahead of training to tell how many are too long
_USABLE, _TOO_LONG, _NOT_ENCODABLE = 0, 1, 2  # what is known of a row so far


@dataclass(frozen=True)
class SourceCounts:
    """What a source has seen since this process started. ``longest_prompt`` is in tokens, over-long ones included."""

    prompts: int  # rows that passed the check at the start
    bad_rows: int  # rows skipped under --skip-bad-rows
    too_long: int  # prompts found so far that are longer than the limit
    longest_prompt: int


class DataSource:
    """Draws prompts, epoch after epoch, as groups of ``n_samples_per_prompt`` pending samples.

    ``max_prompt_len`` is in tokens: longer prompts are skipped and counted, by the very ids that would be served.
    ``prompts`` may be an index built before (``PromptSet(config)``). The constructor already finds one usable prompt,
    or raises InputError. Not safe to call from several threads.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        seed: int,
        n_samples_per_prompt: int,
        max_prompt_len: int,
        prompts: PromptSet | None = None,
        flags: PromptFlags = TRAINING_FLAGS,
    ) -> None:
        if n_samples_per_prompt < 1:
            raise InputError(f"{flags.samples} {n_samples_per_prompt}: expected at least 1")
        if max_prompt_len < 1:
            raise InputError(f"{flags.prompt_len} {max_prompt_len}: expected at least 1 token")
        self.prompts = PromptSet(config, flags.prompt_data) if prompts is None else prompts
        self._flags = flags
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._group_size = n_samples_per_prompt
        self._max_prompt_len = max_prompt_len
        self._known = np.zeros(len(self.prompts), dtype=np.uint8)
        self._longest = 0
        self._waiting: deque[Group] = deque()
        self._next_group = 0
        self._next_sample = 0
        self._epoch = self._position = 0
        self._order = self._order_of(0)
        self._require_usable_prompt()

    @property
    def epoch(self) -> int:
        """The pass over the files that the next new prompt comes from, from 0."""
        return self._epoch

    @property
    def counts(self) -> SourceCounts:
        too_long, not_encodable = (int((self._known == kind).sum()) for kind in (_TOO_LONG, _NOT_ENCODABLE))
        bad_rows = self.prompts.bad_rows.count + not_encodable
        return SourceCounts(len(self.prompts), bad_rows, too_long, self._longest)

    def skipped(self) -> list[str]:
        """What is skipped, a sentence each, for a person to see before training: bad rows, and what the next prompts,
        which are encoded for this, show of over-long ones. Raises InputError for one that cannot be encoded."""
        ahead = self._order[self._position :][:_LOOKED_AT]
        for row, prompt in zip(ahead.tolist(), self.prompts.read_many(ahead), strict=True):
            if self._known[row] == _USABLE:
                self._encode(row, prompt)
        said = self.prompts.skipped_rows()
        files = ", ".join(file["name"] for file in self.prompts.fingerprint())
        for kind, what in (
            (_TOO_LONG, f"have more than {self._max_prompt_len} tokens"),
            (_NOT_ENCODABLE, "cannot be encoded"),
        ):
            found = int((self._known[ahead] == kind).sum())
            if found:
                said.append(f"{files}: {found} of the next {len(ahead)} prompts {what} and are skipped")
        return said

    def next_groups(self, n: int) -> list[Group]:
        """The next ``n`` groups: first those that were returned, then new prompts.

        Every sample holds its prompt's ids in ``tokens`` and its own copies of prompt, label and metadata.
        """
        fresh = self._draw(n - len(self._waiting))
        returned = [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]
        return returned + fresh

    def every_group(self) -> list[Group]:
        """Every usable prompt once, in file order, numbered from 0 whatever was drawn before; the cursor stays."""
        rows = np.flatnonzero(self._known == _USABLE)
        groups: list[Group] = []
        for row, prompt in zip(rows.tolist(), self.prompts.read_many(rows), strict=True):
            tokens = self._encode(row, prompt)
            if tokens is not None:
                number = len(groups)
                groups.append(self._group(row, 0, prompt, tokens, number, number * self._group_size))
        return groups

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None:
        """Put groups that were drawn and not consumed at the front of the line, in the order given.

        They keep what was generated so far; with ``reset`` they start again from the prompt (the first sample, as it
        was drawn, stands for its group). A group that already waits, or was never drawn, is a ValueError: it would be
        trained on twice.
        """
        waiting = {_group_index(group) for group in self._waiting}
        for group in groups:
            index = _group_index(group)
            if index in waiting:
                raise ValueError(f"group {index} was returned twice")
            if not 0 <= index < self._next_group:
                raise ValueError(f"group {index} was not drawn from this source")
            waiting.add(index)
        self._waiting.extendleft(reversed([self._fresh(group) if reset else list(group) for group in groups]))

    def state_dict(self, in_flight: Iterable[Group] = ()) -> dict[str, Any]:
        """The cursor, JSON-ready. ``in_flight`` are groups drawn and neither consumed nor returned: a source restored
        from this state draws them again, from the prompt, before all others."""
        return {
            "version": _STATE_VERSION,
            "fingerprint": self._fingerprint(),
            "group_size": self._group_size,
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "waiting": [_ticket(group) for group in in_flight] + [self._pack(group) for group in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises InputError if it belongs to other prompts or another order."""
        if state.get("version") != _STATE_VERSION:
            raise InputError(
                f"the saved place in the prompts has version {state.get('version')}, expected {_STATE_VERSION}: "
                "it was written by another release"
            )
        try:
            self._take_up(state)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the saved place in the prompts is damaged ({type(error).__name__}: {error}); use another checkpoint"
            ) from error

    def _take_up(self, state: dict[str, Any]) -> None:
        self._check_fingerprint(state["fingerprint"])
        cursor = [state[name] for name in ("epoch", "position", "next_group", "next_sample")]
        if any(type(value) is not int or not 0 <= value < 2**63 for value in cursor) or cursor[1] > len(self.prompts):
            raise ValueError(f"no place among {len(self.prompts)} prompts: {cursor}")
        if state["waiting"] and state["group_size"] != self._group_size:
            raise InputError(
                f"--n-samples-per-prompt {self._group_size}: the checkpoint holds {len(state['waiting'])} unfinished "
                f"groups of {state['group_size']}; resume with --n-samples-per-prompt {state['group_size']}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._waiting = deque(self._unpack(packed) for packed in state["waiting"])

    def _draw(self, n: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < n:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            rows = self._order[self._position : self._position + n - len(groups)]
            self._position += len(rows)
            rows = rows[self._known[rows] == _USABLE]
            for row, prompt in zip(rows.tolist(), self.prompts.read_many(rows), strict=True):
                tokens = self._encode(row, prompt)
                if tokens is not None:
                    groups.append(self._group(row, self._epoch, prompt, tokens, self._next_group, self._next_sample))
                    self._next_group += 1
                    self._next_sample += self._group_size
        return groups

    def _encode(self, row: int, prompt: Prompt) -> list[int] | None:
        """The prompt's ids, or None for one that is skipped. Raises InputError once no row is left."""
        try:
            tokens = self._encode_strictly(prompt)
        except InputError as error:
            if not self._config.skip_bad_rows:
                raise InputError(f"{self.prompts.location(row)}: {error}") from error
            self._skip(row, _NOT_ENCODABLE, str(error))
            return None
        self._longest = max(self._longest, len(tokens))
        if len(tokens) <= self._max_prompt_len:
            return tokens
        self._skip(row, _TOO_LONG, f"{len(tokens)} tokens, the longest has {self._longest}")
        return None

    def _encode_strictly(self, prompt: Prompt) -> list[int]:
        chat = self._config.apply_chat_template
        tokens = encode_prompt(self._tokenizer, prompt.prompt, apply_chat_template=chat)
        if not tokens:
            raise InputError("the tokenizer makes no token of this prompt")
        return tokens

    def _skip(self, row: int, why: int, detail: str) -> None:
        self._known[row] = why
        if self._known.all():
            files = ", ".join(self._config.prompt_data)
            raise InputError(
                f"{self._flags.prompt_data} {files}: none of the {len(self.prompts)} prompts can be used: "
                f"{self.counts.too_long} have more than {self._max_prompt_len} tokens "
                f"({self._flags.prompt_len}, or what {self._flags.response_len} leaves of the "
                f"context); the last one: {detail}"
            )

    def _require_usable_prompt(self) -> None:
        for row in map(int, self._order):
            if self._encode(row, self.prompts.read(row)) is not None:
                return

    def _group(self, row: int, epoch: int, prompt: Prompt, tokens: list[int], group_index: int, first: int) -> Group:
        return [
            Sample(
                prompt=_own(prompt.prompt),
                tokens=list(tokens),
                label=_own(prompt.label),
                index=first + place,
                group_index=group_index,
                prompt_row=row,
                epoch=epoch,
                source=prompt.source,
                metadata=copy.deepcopy(prompt.metadata) if prompt.metadata else {},
            )
            for place in range(self._group_size)
        ]

    def _fresh(self, group: Group) -> Group:
        return self._unpack(_ticket(group))

    def _pack(self, group: Group) -> dict[str, Any]:
        """A group still as it was drawn is saved as a reference to its row; one with anything added, in full."""
        ticket = _ticket(group)
        return ticket if group == self._unpack(ticket) else {"samples": [sample.to_dict() for sample in group]}

    def _unpack(self, packed: dict[str, Any]) -> Group:
        if "samples" in packed:
            return [Sample.from_dict(values) for values in packed["samples"]]
        prompt = self.prompts.read(packed["prompt_row"])
        tokens = self._encode_strictly(prompt)
        return self._group(
            packed["prompt_row"], packed["epoch"], prompt, tokens, packed["group_index"], packed["first_sample"]
        )

    def _order_of(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.prompts), seed=self._seed, epoch=epoch, shuffle=self._config.rollout_shuffle)

    def _fingerprint(self) -> dict[str, Any]:
        return {"files": self.prompts.fingerprint(), "seed": self._seed, "shuffle": self._config.rollout_shuffle}

    def _check_fingerprint(self, saved: dict[str, Any]) -> None:
        ours = self._fingerprint()
        for key, flag in (("seed", "--seed"), ("shuffle", "--rollout-shuffle"), ("files", "--prompt-data")):
            if saved[key] != ours[key]:
                raise InputError(
                    f"{flag}: the checkpoint's place in the prompts was taken with {saved[key]}, "
                    f"this run has {ours[key]}; resume with the same prompts, seed and order, or start anew"
                )


def _own(value: Any) -> Any:
    """A copy that nothing shares; text and numbers cannot be changed and need none."""
    return value if isinstance(value, (str, int, float)) else copy.deepcopy(value)


def _group_index(group: Group) -> int:
    index = group[0].group_index if group else None
    if index is None:
        raise ValueError("a group without a group index cannot be returned")
    return index


def _ticket(group: Group) -> dict[str, Any]:
    """What it takes to draw ``group`` again."""
    first = group[0]
    return {
        "prompt_row": first.prompt_row,
        "epoch": first.epoch,
        "group_index": first.group_index,
        "first_sample": first.index,
    }
