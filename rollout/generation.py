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


def request_id(sample: Sample) -> str:
    """Under which the engine knows the answering of ``sample``."""
    return f"{sample.rollout_id}-{sample.index}"


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
    first_token = sample.response_length == 0
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    result = await engine.generate(
        GenerateRequest(
            request_id=request_id(sample),
            input_ids=tuple(sample.tokens),
            sampling=params if room == params.max_new_tokens else dataclasses.replace(params, max_new_tokens=room),
            seed=seed,
            rollout_id=sample.rollout_id,
            sample_index=sample.index,
            first_position=sample.response_length,
        )
    )
    sample.tokens = sample.tokens + result.output_ids
    sample.response += result.text
    sample.response_length += len(result.output_ids)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + result.log_probs
    if result.kept_token_ids is not None:
        sample.rollout_kept_token_ids = (sample.rollout_kept_token_ids or []) + result.kept_token_ids
    sample.loss_mask = mask + [1] * len(result.output_ids)
    if first_token or sample.weight_version is None:
        sample.weight_version = result.weight_version
    sample.last_weight_version = result.weight_version
    sample.status = _STATUS[result.finish_reason]
