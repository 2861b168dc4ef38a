"""How a rollout's samples are divided: among groups, optimizer steps, ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.checks.rollout import longest_known_sample
from train.config.run import RunConfig


def batch_problems(config: RunConfig) -> Iterator[str]:
    groups, group_size = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    samples = groups * group_size
    given = f"--rollout-batch-size {groups} x --n-samples-per-prompt {group_size} = {samples} samples"
    steps, global_batch = config.batch.num_steps_per_rollout, config.batch.global_batch_size
    post_process = config.reward.custom_reward_post_process_path
    convert = config.rollout.custom_convert_samples_to_train_data_path  # either may give advantages of its own
    if group_size == 1 and post_process is None and convert is None:
        yield (
            "--n-samples-per-prompt 1: GRPO compares the responses to one prompt, and a lone one always has advantage "
            "0; use at least 2"
        )
    if steps is not None and global_batch is not None:
        if steps * global_batch != samples:
            fits = (
                f"leave --global-batch-size out (it follows: {samples // steps})"
                if samples % steps == 0
                else f"--num-steps-per-rollout {nearest_divisor(samples, steps)} without --global-batch-size works"
            )
            yield f"--num-steps-per-rollout {steps} x --global-batch-size {global_batch} is not {given}; {fits}"
    elif steps is not None and samples % steps:
        yield f"--num-steps-per-rollout {steps} does not divide {given}; {nearest_divisor(samples, steps)} does"
    elif global_batch is not None and samples % global_batch:
        works = nearest_divisor(samples, global_batch)
        yield f"--global-batch-size {global_batch} does not divide {given}; {works} does"
    in_step = min(global_batch or samples, samples // steps if steps else samples)
    ranks = config.data_parallel_size
    if in_step < ranks:
        yield (
            f"{in_step} samples in an optimizer step leave some of {ranks} data-parallel ranks without one; use a "
            f"--global-batch-size of at least {ranks} or fewer devices"
        )


def micro_batch_problems(config: RunConfig) -> Iterator[str]:
    batch = config.batch
    if not batch.use_dynamic_batch_size:
        if batch.max_tokens_per_gpu is not None:
            yield f"--max-tokens-per-gpu {batch.max_tokens_per_gpu} needs --use-dynamic-batch-size"
        return
    if batch.micro_batch_size is not None:
        yield (
            f"--micro-batch-size {batch.micro_batch_size} and --use-dynamic-batch-size are two ways to choose a "
            "micro-batch; leave one out"
        )
    longest, why = longest_known_sample(config)
    if batch.max_tokens_per_gpu is None:
        yield f"--use-dynamic-batch-size needs --max-tokens-per-gpu, at least {longest} here ({why})"
    elif batch.max_tokens_per_gpu < longest:
        yield (
            f"--max-tokens-per-gpu {batch.max_tokens_per_gpu} is less than one sample can have, {longest} tokens "
            f"({why}); use at least {longest}"
        )


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` closest to ``wanted``; the smaller of two."""
    divisors = {d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)}
    return min(divisors, key=lambda d: (abs(d - wanted), d))
