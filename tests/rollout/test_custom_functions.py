"""Functions that a user gives by path: what they are called with, what they may return, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools

import numpy as np
import pytest

from rollout import testing
from rollout.config import RewardConfig, RolloutConfig
from rollout.custom.contracts import CONVERT, GENERATE, GROUP_REWARD, REWARD_POST_PROCESS, ROLLOUT
from rollout.custom.errors import CustomFunctionError
from rollout.custom.generate import CustomGenerate
from rollout.engines.protocol import SamplingParams
from rollout.group import GroupRunner
from rollout.rewards import build_reward
from rollout.rewards.custom import CustomReward
from rollout.testing import EchoEngine, EchoTokenizer, example_args, example_groups
from samples import InputError, Sample, Status
from samples.signatures import bind_function
from tests.rollout.custom_cases import (
    fans_out,
    not_async,
    plain_generate,
)
from train.batch import batch_from_groups
from train.config.run import RunConfig

HERE = __name__
CASES = "tests.rollout.custom_cases"
PARAMS = SamplingParams(max_new_tokens=8)


# Signatures, checked when a function is loaded


async def lacks_params(args, sample):
    return sample


async def wants_more(args, sample, sampling_params, router):
    return sample


@pytest.mark.parametrize(
    ("function", "contract", "message"),
    [
        (lacks_params, GENERATE, r"lacks_params\(args, sample\): lacks sampling_params; it is called as generate\("),
        (wants_more, GENERATE, r"requires 'router'; .*context, evaluation, and anything else needs a default"),
        (not_async, GENERATE, r"is a plain function, which would hold up every other response; write async def"),
        (plain_generate, GROUP_REWARD, r"requires 'sampling_params'"),
        (lambda: None, REWARD_POST_PROCESS, r"lacks args, samples; it is called as post_process\(args, samples\)"),
        (lambda args: None, CONVERT, r"lacks samples"),
        (lacks_params, ROLLOUT, r"--rollout-function-path .*lacks data_source"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_naming_what_is_missing(function, contract, message):
    with pytest.raises(InputError, match=message):
        bind_function(f"mine.{function.__name__}", function, contract)


def test_only_the_keywords_that_a_signature_names_are_passed():
    def takes_none(args, samples):
        return "none"

    def takes_all(args, sample, params, **kwargs):
        return sorted(kwargs)

    def takes_one(args, sample, params, *, evaluation=None):
        return evaluation

    loose = GENERATE.__class__("--x", GENERATE.positional, GENERATE.keywords, "x")
    assert bind_function("m.f", takes_all, loose).call(1, 2, 3, context=4, evaluation=5) == ["context", "evaluation"]
    assert bind_function("m.f", takes_one, loose).call(1, 2, 3, context=4, evaluation=5) == 5
    assert bind_function("m.f", takes_none, CONVERT).call(1, 2, context=4) == "none"
    partial = functools.partial(takes_one, evaluation=7)
    assert bind_function("m.f", partial, loose).call(1, 2, 3, evaluation=5) == 7


# Generating


def runner(generate=None, reward=None, engine=None, **settings) -> GroupRunner:
    async def one(args, sample):
        return float(len(sample.response))

    args = example_args(**settings)
    made = reward or CustomReward(one, "mine.one", args, timeout=9, concurrency=4, reward_key=None)
    custom = None
    if generate is not None:
        custom = CustomGenerate(bind_function("mine.generate", generate, GENERATE), args, EchoTokenizer())
    return GroupRunner(engine or EchoEngine(), made, args, seed=0, max_context_len=64, generate=custom)


async def test_a_generate_function_takes_turns_and_only_the_policys_tokens_take_gradient():
    async def two_turns(args, sample, sampling_params, *, context, evaluation):
        await context.answer(sample)
        context.append(sample, context.tokenizer.encode("tool"))
        return await context.answer(sample)

    (group,) = example_groups(1, 2, answered=False)
    await runner(two_turns).run(group, PARAMS, rollout_id=3)
    sample = group[0]
    assert (sample.response, sample.status, sample.rollout_id) == (" =toolol", Status.COMPLETED, 3)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 0, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, 0, 0, 0, 0, -0.5, -0.5]
    batch_from_groups([group], RunConfig())


async def test_responses_that_fan_out_go_through_hooks_and_rewards_and_keep_their_numbers():
    (group,) = example_groups(1, 2, answered=False)
    hooked = runner(fans_out, rollout_sample_hook_path=(f"{CASES}.marks",))
    await hooked.run(group, PARAMS, rollout_id=0, evaluation=True)
    assert [[sample.index for sample in member] for member in group] == [[0, 0], [1, 1]]
    assert [[sample.reward for sample in member] for member in group] == [[2.0, 1.0]] * 2
    assert all(sample.metadata["hooked"] for member in group for sample in member)


async def test_copies_of_a_sample_are_answered_at_once_and_independently():
    async def best_of_three(args, sample, sampling_params, *, context):
        copies = [sample, copy.deepcopy(sample), copy.deepcopy(sample)]
        await asyncio.gather(*(context.answer(one) for one in copies))
        await context.answer(copies[1])
        return copies

    engine = EchoEngine()
    (group,) = example_groups(1, 1, answered=False)
    await runner(best_of_three, engine=engine).run(group, PARAMS, rollout_id=3)
    assert [request.request_id for request in engine.requests] == ["3-0", "3-0-1", "3-0-2", "3-0-1"]
    assert len({request.seed for request in engine.requests}) == 3
    assert engine.requests[0].seed == 0


async def test_kept_token_ids_stay_in_step_with_tokens_that_were_put_in_first():
    class Filtering(EchoEngine):
        async def generate(self, request):
            result = await super().generate(request)
            return dataclasses.replace(result, kept_token_ids=[[token] for token in result.output_ids])

    async def begins_with_a_hint(args, sample, sampling_params, *, context):
        context.append(sample, [65, 66])
        return await context.answer(sample)

    (group,) = example_groups(1, 2, answered=False)
    await runner(begins_with_a_hint, engine=Filtering()).run(group, PARAMS, rollout_id=0)
    assert group[0].rollout_kept_token_ids == [[], [], [65], [66]]
    batch_from_groups([group], RunConfig())


async def test_a_reward_that_a_generate_function_gave_stays():
    async def scores(args, sample, sampling_params, *, context):
        sample.reward = 0.25
        return await context.answer(sample)

    (group,) = example_groups(1, 2, answered=False)
    await runner(scores).run(group, PARAMS, rollout_id=0)
    assert [sample.reward for sample in group] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"--custom-generate-function-path mine.generate returned None for sample 0 \(group 0\): expected a Sam"),
        ([], "returned .*expected a Sample, or a list of at least one"),
        (Sample(tokens=[1]), "it is still pending"),
        (Sample(tokens=[1], response_length=3, status=Status.COMPLETED), "response_length is 3 but there are 1 tokens"),
    ],
)
async def test_what_a_generate_function_may_not_return_names_function_and_sample(returned, message):
    async def generate(args, sample, sampling_params):
        return returned

    with pytest.raises(CustomFunctionError, match=message):
        await runner(generate).run(example_groups(1, 1, answered=False)[0], PARAMS, rollout_id=0)


async def test_an_error_in_a_generate_function_names_function_sample_and_place():
    async def generate(args, sample, sampling_params):
        raise LookupError("no tool")

    with pytest.raises(CustomFunctionError, match=r"failed on sample 0 \(group 0\): LookupError: no tool \(.*line \d+"):
        await runner(generate).run(example_groups(1, 1, answered=False)[0], PARAMS, rollout_id=0)


# Group rewards


async def test_a_group_reward_is_called_once_a_group():
    config = RewardConfig(custom_rm_path=f"{CASES}.ranked", group_rm=True)
    reward = build_reward(config, example_args())
    group = example_groups(1, 3)[0]
    assert await reward.score_group(group) == [0.0, 2 / 3, 1 / 3]
    assert [sample.reward for sample in group] == [0.0, 2 / 3, 1 / 3]
    await reward.close()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"returned 1 rewards for the 3 samples of group 0"),
        (1.0, r"returned float for group 0: expected a list with a reward for each"),
        ([1.0, float("nan"), 0.0], r"nan .*for sample 1: a reward must be finite"),
        ("abc", "expected a list"),
    ],
)
def test_a_group_reward_that_does_not_fit_the_group_is_refused(returned, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_group_reward(lambda args, samples: returned)


# The training batch


def doubled(args, samples):
    return {
        "tokens": [s.tokens for s in samples for _ in range(2)],
        "response_lengths": [s.response_length for s in samples for _ in range(2)],
        "rewards": [s.reward for s in samples for _ in range(2)],
        "rollout_log_probs": [s.rollout_log_probs for s in samples for _ in range(2)],
        "group_ids": [s.group_index for s in samples for _ in range(2)],
    }


def config_with(**settings) -> RunConfig:
    reward = {k: v for k, v in settings.items() if k in RewardConfig.model_fields}
    rollout = {k: v for k, v in settings.items() if k in RolloutConfig.model_fields}
    return RunConfig.model_validate({"reward": reward, "rollout": rollout})


def test_post_processed_rewards_are_the_advantages_of_what_is_trained_on():
    groups = example_groups(scored=True)
    groups[0][1].status = Status.FAILED
    batch = batch_from_groups(groups, config_with(custom_reward_post_process_path=f"{CASES}.centred"))
    assert batch.advantages.tolist() == [0.5, 0.0, 0.5 if groups[0][2].reward else -0.5, 0.5, -0.5, -0.5]
    assert batch.rewards.tolist()[3:] == [1.0, 0.0, 0.0]


def test_a_conversion_may_make_more_samples_than_there_were():
    groups = example_groups(scored=True)
    path = f"{HERE}.doubled"
    batch = batch_from_groups(groups, config_with(custom_convert_samples_to_train_data_path=path))
    assert len(batch) == 12
    plain = batch_from_groups(groups, RunConfig())
    assert sorted(set(batch.group_ids.tolist())) == [0, 1]
    assert np.sign(batch.advantages[::2]).tolist() == np.sign(plain.advantages).tolist()


def test_a_conversion_may_give_advantages_and_removed_samples_stay_out():
    groups = example_groups(scored=True)
    groups[1][0].remove_sample = True
    path = f"{CASES}.same_samples"
    batch = batch_from_groups(groups, config_with(custom_convert_samples_to_train_data_path=path))
    assert batch.advantages.tolist() == [0, 1, 2, 3, 4, 5]
    assert [bool(mask.any()) for mask in batch.loss_masks] == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "returned list: expected a mapping of columns"),
        ({"tokens": []}, "returned no 'response_lengths', 'rewards'"),
        ({"tokens": [[1]], "response_lengths": [1, 2], "rewards": [0]}, "response_lengths has 2 entries, expected 1"),
        (
            {"tokens": [[1, 2]], "response_lengths": [1], "rewards": [0]},
            "returned 1 entries for 6 samples: give 'group",
        ),
        ({"tokens": [], "response_lengths": [], "rewards": [], "mask": []}, r"columns \['mask'\], which nothing reads"),
        ({"tokens": [[1, 2]], "response_lengths": [1], "rewards": ["a"], "group_ids": [0]}, "expected a finite number"),
    ],
)
def test_columns_that_do_not_fit_are_refused(returned, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_conversion(lambda args, samples: returned)
