"""One sample through the engine: from its prompt tokens to its response."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rollout.config import RolloutConfig
from rollout.engines.protocol import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from samples.sample import Sample, Status
from samples.weight_spans import joined

_STATUS = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


def sampling_params(config: RolloutConfig) -> SamplingParams:
    """The training rollout's sampling parameters."""
    return SamplingParams(
        max_new_tokens=config.rollout_max_response_len,
        min_new_tokens=config.rollout_min_response_len,
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        stop=config.rollout_stop,
        stop_token_ids=config.rollout_stop_token_ids,
    )


class Generates(Protocol):
    """What answering a sample asks of an engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...


async def generate_sample(
    engine: Generates, sample: Sample, params: SamplingParams, *, seed: int, max_context_len: int, branch: int = 0
) -> None:
    """Answer ``sample`` in place; a sample that already holds a partial response goes on from there.

    ``branch`` tells apart several samples under one index, into which a response fans out: each above 0 has requests
    and random numbers of its own.
    """
    assert sample.index is not None
    assert sample.rollout_id is not None
    room = min(params.max_new_tokens - sample.response_length, max_context_len - len(sample.tokens))
    if room <= 0:
        sample.status = Status.TRUNCATED
        return
    least = min(max(0, params.min_new_tokens - sample.response_length), room)
    if (room, least) != (params.max_new_tokens, params.min_new_tokens):
        params = dataclasses.replace(params, max_new_tokens=room, min_new_tokens=least)
    first_token = sample.response_length == 0
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    result = await engine.generate(
        GenerateRequest(
            request_id=f"{sample.rollout_id}-{sample.index}" + (f"-{branch}" if branch else ""),
            input_ids=tuple(sample.tokens),
            sampling=params,
            seed=seed + (branch << 32),  # seeds of runs are below 2**32
            rollout_id=sample.rollout_id,
            sample_index=sample.index,
            first_position=sample.response_length,
        )
    )
    before = sample.response_length
    spans = result.spans
    older = [] if first_token else sample.version_spans() or [[result.weight_version, before]]
    sample.weight_version_spans = joined(older, spans)
    sample.tokens = sample.tokens + result.output_ids
    sample.response += result.text
    sample.response_length += len(result.output_ids)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + result.log_probs
    if result.kept_token_ids is not None:
        kept = sample.rollout_kept_token_ids
        kept = [[] for _ in range(before)] if kept is None else kept  # of tokens that were put in, nothing was left out
        sample.rollout_kept_token_ids = kept + result.kept_token_ids
    sample.loss_mask = mask + [1] * len(result.output_ids)
    if first_token or sample.weight_version is None:
        sample.weight_version = result.weight_version
    if spans or first_token:
        sample.last_weight_version = spans[-1][0] if spans else result.weight_version
    sample.status = _STATUS[result.finish_reason]
