"""One sample through the engine: from its prompt tokens to its response."""

from __future__ import annotations

import dataclasses

from rollout.config import RolloutConfig
from rollout.engines.protocol import Engine, FinishReason, GenerateRequest, SamplingParams
from samples.sample import Sample, Status

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


async def generate_sample(
    engine: Engine, sample: Sample, params: SamplingParams, *, seed: int, max_context_len: int
) -> None:
    """Answer ``sample`` in place; a sample that already holds a partial response goes on from there."""
    assert sample.index is not None
    assert sample.rollout_id is not None
    room = min(params.max_new_tokens - sample.response_length, max_context_len - len(sample.tokens))
    if room <= 0:
        sample.status = Status.TRUNCATED
        return
    result = await engine.generate(
        GenerateRequest(
            request_id=f"{sample.rollout_id}-{sample.index}",
            input_ids=tuple(sample.tokens),
            sampling=params if room == params.max_new_tokens else dataclasses.replace(params, max_new_tokens=room),
            seed=seed,
            rollout_id=sample.rollout_id,
            sample_index=sample.index,
            first_position=sample.response_length,
        )
    )
    first_token = sample.response_length == 0
    sample.tokens = sample.tokens + result.output_ids
    sample.response += result.text
    sample.response_length += len(result.output_ids)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + result.log_probs
    if result.kept_token_ids is not None:
        sample.rollout_kept_token_ids = (sample.rollout_kept_token_ids or []) + result.kept_token_ids
    sample.loss_mask = [1] * sample.response_length
    if first_token or sample.weight_version is None:  # as in the engine, a response has the version of its first token
        sample.weight_version = result.weight_version
    sample.status = _STATUS[result.finish_reason]
