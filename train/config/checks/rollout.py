"""Sampling, lengths and rewards."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.rm_types import check_rm_type, check_rm_url
from samples.errors import InputError
from train.config.run import RunConfig


def sampling_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    over, batch = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if over is not None and over < batch:
        yield (
            f"--over-sampling-batch-size {over} is less than --rollout-batch-size {batch}, which a round must be able "
            f"to fill; use at least {batch}, or leave it out"
        )
    drops = rollout.dynamic_sampling_filter_path is not None or rollout.rollout_sample_hook_path
    wastes_nothing = rollout.partial_rollout or rollout.keep_surplus_groups
    if over is not None and over > batch and not drops and not wastes_nothing:
        yield (
            f"--over-sampling-batch-size {over} is more than --rollout-batch-size {batch}, and nothing drops groups: "
            f"{over - batch} generated groups of every step would go unused; give --dynamic-sampling-filter-path, "
            "--keep-surplus-groups or --partial-rollout, or leave it out"
        )
    if rollout.rollout_top_k == 0:
        yield "--rollout-top-k 0: leaves no token to choose from; use -1 for all, or at least 1"
    elif rollout.rollout_top_k == 1:
        yield "--rollout-top-k 1: is greedy, so the responses of a group are all alike; use -1 for all, or at least 2"
    if config.algorithm.use_rollout_logprobs and (rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0):
        chosen = f"--rollout-top-p {rollout.rollout_top_p:g}"
        chosen = chosen if rollout.rollout_top_p < 1 else f"--rollout-top-k {rollout.rollout_top_k}"
        yield (
            f"--use-rollout-logprobs with {chosen}: the rollout's log-probabilities are of the whole distribution, not "
            "of the one that was sampled from; leave one of them out"
        )
    yield from _function_problems(config)
    yield from _stop_problems(config)


def _function_problems(config: RunConfig) -> Iterator[str]:
    rollout, reward = config.rollout, config.reward
    function = rollout.rollout_function_path
    if function is not None and rollout.over_sampling_batch_size is not None:
        yield (
            f"--over-sampling-batch-size {rollout.over_sampling_batch_size} with --rollout-function-path {function}: "
            "the function decides how many groups it draws; leave one of them out"
        )
    if reward.group_rm and reward.custom_rm_path is None:
        yield "--group-rm: only a function of yours scores whole groups; give --custom-rm-path too"


def _stop_problems(config: RunConfig) -> Iterator[str]:
    if "" in config.rollout.rollout_stop:
        yield "--rollout-stop '': an empty string is found in every response; give the text that ends one"
    for token in config.rollout.rollout_stop_token_ids:
        if token < 0:
            yield f"--rollout-stop-token-ids {token}: is not a token id; they count from 0"


def length_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    least, most = rollout.rollout_min_response_len, rollout.rollout_max_response_len
    if least > most:
        yield f"--rollout-min-response-len {least} is more than --rollout-max-response-len {most}"
    context = rollout.rollout_max_context_len
    prompt = config.data.rollout_max_prompt_len
    if context is not None and most >= context:
        yield (
            f"--rollout-max-response-len {most} leaves no room for a prompt in --rollout-max-context-len {context}; "
            f"use at most {context - 1}"
        )
    elif context is not None and prompt is not None and prompt + most > context:
        yield (
            f"--rollout-max-prompt-len {prompt} and --rollout-max-response-len {most} are more than "
            f"--rollout-max-context-len {context} together; use at most {context - most} for the prompt"
        )
    longest, why = longest_known_sample(config)
    cache = rollout.engine_max_total_tokens
    if cache is not None and cache < longest:
        yield (
            f"--engine-max-total-tokens {cache} cannot hold one request, which can have {longest} tokens ({why}); use "
            f"at least {longest}"
        )


def reward_problems(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.custom_rm_path is not None:  # takes the place of --rm-type, and may use --rm-url for itself
        return
    try:
        kind = check_rm_type(reward.rm_type)[0]
    except InputError as error:
        yield str(error)
        return
    if kind == "remote_rm":
        try:
            check_rm_url(reward.rm_url)
        except InputError as error:
            yield str(error)
    elif reward.rm_url is not None:
        yield (
            f"--rm-url {reward.rm_url} is not used by --rm-type {reward.rm_type}; give --rm-type remote_rm, or no URL"
        )
    if kind in ("exact_match", "math") and config.data.label_key is None:
        yield f"--label-key none: --rm-type {kind} compares with a label; name its field"


def longest_known_sample(config: RunConfig) -> tuple[int, str]:
    """Tokens that a sample may have as far as the flags tell, and which flags tell it.

    Without a limit on prompts this is the shortest prompt there is and the longest response.
    """
    rollout, prompt = config.rollout, config.data.rollout_max_prompt_len
    response = rollout.rollout_max_response_len
    if prompt is None:
        return response + 1, f"--rollout-max-response-len {response} and a prompt"
    return prompt + response, f"--rollout-max-prompt-len {prompt} and --rollout-max-response-len {response}"
