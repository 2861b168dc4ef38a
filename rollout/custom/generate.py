"""``--custom-generate-function-path``: the user's own way from a sample to its response, over our engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollout.custom.contracts import GENERATE
from rollout.custom.errors import CustomFunctionError, failed
from rollout.engines.protocol import SamplingParams
from rollout.generation import Generates, generate_sample
from samples.cancellation import is_cancelled
from samples.sample import Sample, Status
from samples.signatures import UserFunction, load_user_function
from samples.weight_spans import joined

Generated = Sample | list[Sample]


class GenerateContext:
    """What a generate function has to work with. One for each sample; its calls may be made any number of times."""

    def __init__(
        self,
        engine: Generates,
        params: SamplingParams,
        *,
        seed: int,
        max_context_len: int,
        tokenizer: Any,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context_len = max_context_len
        self._engine = engine
        self._params = params
        self._seed = seed
        self._stopping = stopping
        self._branches: list[Sample] = []  # samples that were answered, the response's own first

    async def answer(self, sample: Sample, sampling_params: SamplingParams | None = None) -> Sample:
        """Have the engine go on after ``sample.tokens``, in place, with tokens, text, log-probabilities and status.

        Called again it appends a further turn. The new tokens take gradient; random numbers are the run's own. A sample
        that comes back ABORTED is to be returned as it is: there is no more for it in this rollout. Copies of a sample
        are answered each with random numbers of its own, also at once.
        """
        if self._stopping():
            sample.status = Status.ABORTED
            return sample
        params = self._params if sampling_params is None else sampling_params
        sample.status = Status.PENDING
        settings = {"seed": self._seed, "max_context_len": self.max_context_len, "branch": self._branch(sample)}
        await generate_sample(self._engine, sample, params, **settings)
        return sample

    def _branch(self, sample: Sample) -> int:
        """Its place among the samples that were answered: copies of a sample are answered independently."""
        for branch, known in enumerate(self._branches):
            if known is sample:
                return branch
        self._branches.append(sample)
        return len(self._branches) - 1

    def append(self, sample: Sample, token_ids: Sequence[int], text: str | None = None) -> Sample:
        """Put tokens that the policy did not write, such as a tool's output, after the response, in place.

        They are part of the response, take no gradient (loss mask 0) and have log-probability 0. ``text`` is by default
        what the tokenizer makes of them.
        """
        ids = [int(token) for token in token_ids]
        masked = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        sample.tokens = [*sample.tokens, *ids]
        sample.response += self.tokenizer.decode(ids) if text is None else text
        sample.response_length += len(ids)
        sample.loss_mask = masked + [0] * len(ids)
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + [0.0] * len(ids)
        if sample.weight_version_spans:
            latest = sample.weight_version_spans[-1][0]
            sample.weight_version_spans = joined(sample.weight_version_spans, [[latest, len(ids)]])
        if sample.rollout_kept_token_ids is not None:
            sample.rollout_kept_token_ids = sample.rollout_kept_token_ids + [[] for _ in ids]
        return sample


class CustomGenerate:
    """Calls the user's function and checks what comes back: finished samples, one or several for a response."""

    def __init__(self, function: UserFunction, args: Any, tokenizer: Any) -> None:
        self._function = function
        self._args = args
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: str, args: Any, tokenizer: Any, user_code_dir: str | None) -> CustomGenerate:
        """Raises InputError for a function that cannot be called as a generate function."""
        return cls(load_user_function(path, GENERATE, user_code_dir), args, tokenizer)

    async def __call__(
        self,
        engine: Generates,
        sample: Sample,
        params: SamplingParams,
        *,
        seed: int,
        max_context_len: int,
        evaluation: bool,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Generated:
        """The finished sample, or the samples that its response fanned out into. Raises CustomFunctionError."""
        context = GenerateContext(
            engine, params, seed=seed, max_context_len=max_context_len, tokenizer=self._tokenizer, stopping=stopping
        )
        subject = f"sample {sample.index} (group {sample.group_index})"
        try:
            generated = await self._function.call(self._args, sample, params, context=context, evaluation=evaluation)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            raise failed(GENERATE.flag, self._function.path, subject, error) from error
        return checked_generated(generated, sample, f"{GENERATE.flag} {self._function.path}")


def checked_generated(generated: Any, origin: Sample, name: str) -> Generated:
    """``generated`` if a generate function may return it for ``origin``; samples without a number get its numbers."""
    members = generated if isinstance(generated, list) else [generated]
    told = f"{name} returned {_shown(generated)} for sample {origin.index} (group {origin.group_index})"
    if not members or not all(isinstance(member, Sample) for member in members):
        raise CustomFunctionError(f"{told}: expected a Sample, or a list of at least one")
    if len(set(map(id, members))) < len(members):
        raise CustomFunctionError(f"{told}: the same sample twice; it would be trained on twice (use copy.deepcopy)")
    for member in members:
        if member.status is Status.PENDING:
            raise CustomFunctionError(
                f"{told}: it is still pending; await context.answer(sample), or set tokens, response_length and status"
            )
        if not 0 <= member.response_length <= len(member.tokens):
            raise CustomFunctionError(
                f"{told}: response_length is {member.response_length} but there are {len(member.tokens)} tokens"
            )
        for field in ("index", "group_index", "rollout_id", "prompt_row", "epoch", "source"):
            if getattr(member, field) is None:
                setattr(member, field, getattr(origin, field))
    return list(members) if isinstance(generated, list) else generated


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
