"""The record that travels through the whole runtime: one prompt and one response to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from samples.weight_spans import Spans, fitted

Message = dict[str, Any]
Reward = float | dict[str, Any]


class Status(StrEnum):
    """Where a sample stands in its life."""

    PENDING = "pending"  # not generated, or aborted half-way and to be continued
    COMPLETED = "completed"  # ended by an end-of-sequence token or a stop string
    TRUNCATED = "truncated"  # ended by a length limit
    ABORTED = "aborted"  # ended by an abort; what was generated so far is kept
    FAILED = "failed"  # could not be generated or scored


@dataclass
class Sample:
    """One prompt with one response.

    ``tokens`` holds prompt and response ids; the response is its last ``response_length`` entries. ``loss_mask`` and
    ``rollout_log_probs`` (natural logarithm, of the temperature-scaled, unfiltered distribution) have
    ``response_length`` entries each. ``rollout_kept_token_ids`` holds, for each response token, the ids that top-p and
    top-k left to choose from, or is None when nothing was filtered.
    """

    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Reward | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_kept_token_ids: list[list[int]] | None = None
    status: Status = Status.PENDING
    index: int | None = None  # counts samples over the whole run, from 0
    group_index: int | None = None  # counts prompts over the whole run, from 0: the responses to one prompt share it
    rollout_id: int | None = None  # the rollout that dispatched this sample
    train_step: int | None = None  # the training step that consumed it
    weight_version: int | None = None  # the policy that generated it: of a response's tokens, the oldest
    last_weight_version: int | None = None  # the policy of its newest tokens: another one where it was interrupted
    weight_version_spans: Spans | None = None  # [version, tokens] of each stretch of the response, in order
    prompt_row: int | None = None  # the prompt's row among all rows of the prompt files, from 0
    epoch: int | None = None  # the pass over the prompt files that drew it, from 0
    source: str | None = None  # the name of the data source, for metrics by source
    session_id: str | None = None
    reward_adjustment: float = 0.0  # what sample hooks add to the reward once it is scored
    remove_sample: bool = False  # keep in statistics, take no gradient from it
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> list[int]:
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.response_length :]

    def version_spans(self) -> Spans | None:
        """``[version, tokens]`` of each stretch, of ``response_length`` tokens in all; None where no version is known.

        A hook may have shortened or lengthened the response since it was written: what it put at the end counts as of
        the newest weights.
        """
        if self.weight_version is None:
            return None
        newest = self.weight_version if self.last_weight_version is None else self.last_weight_version
        return fitted(self.weight_version_spans or [], self.response_length, newest)

    def reward_value(self, reward_key: str | None = None) -> float:
        """The reward as a number; ``reward_key`` picks it from a mapping (``--reward-key``)."""
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward yet")
        if isinstance(self.reward, dict):
            if reward_key is None:
                raise ValueError(f"sample {self.index} has a mapping as reward {sorted(self.reward)}: set --reward-key")
            if reward_key not in self.reward:
                raise ValueError(
                    f"--reward-key {reward_key!r}: the reward of sample {self.index} has {sorted(self.reward)}"
                )
            return float(self.reward[reward_key])
        return float(self.reward)

    def apply_reward_adjustment(self, reward_key: str | None = None) -> None:
        """Add ``reward_adjustment`` to a reward that is there, once: it is zero afterwards."""
        if self.reward is None or not self.reward_adjustment:
            return
        adjusted = self.reward_value(reward_key) + self.reward_adjustment
        if isinstance(self.reward, dict) and reward_key is not None:
            self.reward = {**self.reward, reward_key: adjusted}
        else:
            self.reward = adjusted
        self.reward_adjustment = 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; ``from_dict`` gives the sample back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["status"] = self.status.value
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        return cls(**{**values, "status": Status(values["status"])})


Group = list[Sample]
