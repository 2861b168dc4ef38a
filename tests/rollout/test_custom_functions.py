"""Functions that a user gives by path: what they are called with, what they may return, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from samples.config import DataConfig
from samples.custom_source import CustomDataSource, open_custom_source
from samples.errors import RunError
from samples.signatures import bind_function
from train.batch import batch_from_groups
from train.config.run import RunConfig

HERE = __name__
PARAMS = SamplingParams(max_new_tokens=8)


# Signatures, checked when a function is loaded


async def plain_generate(args, sample, sampling_params, *, context):
    return await context.answer(sample)


async def lacks_params(args, sample):
    return sample


async def wants_more(args, sample, sampling_params, router):
    return sample


def not_async(args, sample, sampling_params):
    return sample


async def answers_rollout(args, rollout_id, data_source, *, context):
    return [await context.generate(group) for group in data_source.get_samples(args.rollout_batch_size)]


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


async def fans_out(args, sample, sampling_params, *, context):
    await context.answer(sample)
    second = Sample(prompt="sub", tokens=[7, 8, 9], response="x", response_length=1, rollout_log_probs=[-1.0])
    second.status = Status.COMPLETED
    return [sample, second]


def marks(args, sample, *, evaluation):
    sample.metadata["hooked"] = evaluation


async def test_responses_that_fan_out_go_through_hooks_and_rewards_and_keep_their_numbers():
    (group,) = example_groups(1, 2, answered=False)
    hooked = runner(fans_out, rollout_sample_hook_path=(f"{HERE}.marks",))
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


def ranked(args, samples):
    return np.argsort(np.argsort([len(sample.response) for sample in samples])) / len(samples)


async def test_a_group_reward_is_called_once_a_group():
    config = RewardConfig(custom_rm_path=f"{HERE}.ranked", group_rm=True)
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


def centred(args, samples):
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    return rewards, [reward - 0.5 for reward in rewards]


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
    batch = batch_from_groups(groups, config_with(custom_reward_post_process_path=f"{HERE}.centred"))
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


def same_samples(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "advantages": list(range(len(samples))),
    }


def test_a_conversion_may_give_advantages_and_removed_samples_stay_out():
    groups = example_groups(scored=True)
    groups[1][0].remove_sample = True
    path = f"{HERE}.same_samples"
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


# A data source


class Counting:
    """Counts upwards, and ends at 50."""

    def __init__(self, args):
        self.args, self.at = args, 0

    def get_samples(self, n):
        first, self.at = self.at, min(self.at + n, 50)
        return [[Sample(prompt=f"{i}=", label=str(i)) for _ in range(2)] for i in range(first, self.at)]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def counting(**settings) -> CustomDataSource:
    return CustomDataSource(
        Counting, DataConfig(), EchoTokenizer(), path="mine.Counting", seed=0, n_samples_per_prompt=2,
        **({"max_prompt_len": 9} | settings),
    )  # fmt: skip


def test_a_custom_source_is_numbered_encoded_and_ends():
    source = counting()
    groups = source.next_groups(3)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [group[0].group_index for group in groups] == [0, 1, 2]
    assert groups[1][0].tokens == [ord("1"), ord("=")]
    assert len(source.next_groups(60)) == 47
    assert source.next_groups(1) == []


def test_every_group_of_a_custom_source_comes_once_over_a_save_and_resume():
    source = counting()
    first = source.next_groups(6)
    first[1][0].response, first[1][0].tokens = "half", [1, 2, 3]
    source.return_groups([first[1]])
    source.return_groups([[first[2][0]]], reset=True)
    state = json.loads(json.dumps(source.state_dict([[first[5][0]]])))
    resumed = counting()
    resumed.load_state_dict(state)
    again = resumed.next_groups(60)
    assert [group[0].group_index for group in again] == [5, 2, 1, *range(6, 50)]
    assert again[2][0].response == "half"
    assert [sample.response for sample in again[0]] == ["", ""]
    resumed.return_groups([[again[1][0]]], reset=True)
    assert [s.index for s in resumed.next_groups(1)[0]] == [4, 5]


def test_prompts_that_are_too_long_are_skipped_and_counted():
    source = counting(max_prompt_len=2)
    assert len(source.next_groups(50)) == 10
    assert source.counts.too_long == 40


class Lacking:
    def __init__(self, args):
        pass

    def get_samples(self, n):
        return []


class Failing(Counting):
    def get_samples(self, n):
        raise LookupError("down")


class Flat(Counting):
    def get_samples(self, n):
        return [Sample(prompt="a")]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Lacking", InputError, r"--data-source-path .*Lacking: lacks state_dict, load_state_dict"),
        ("Failing", RunError, r"Failing.get_samples failed: LookupError: down"),
        ("Flat", RunError, r"expected a list of groups, each a list of at least one Sample"),
    ],
)
def test_a_custom_source_that_is_none_is_refused_by_name(name, error, message):
    config = DataConfig(data_source_path=f"{HERE}.{name}")
    with pytest.raises(error, match=message):
        open_custom_source(
            config, EchoTokenizer(), seed=0, n_samples_per_prompt=2, max_prompt_len=9, user_code_dir=None
        ).next_groups(1)


def test_a_checkpoint_of_other_prompts_is_refused():
    with pytest.raises(InputError, match="was saved without --data-source-path"):
        counting().load_state_dict({"version": 1})
    with pytest.raises(InputError, match="is that of --data-source-path other"):
        counting().load_state_dict({"custom": {}, "path": "other"})


# The contract tests that a user can import


def test_every_contract_test_passes_what_keeps_the_contract():
    assert testing.check_reward(lambda args, sample: len(sample.response)) == [1, 5, 1, 1, 5, 1]
    assert testing.check_reward(lambda args, sample: {"a": 1.0}, reward_key="a")[0] == {"a": 1.0}
    assert testing.check_group_reward(ranked) == [0.0, 2 / 3, 1 / 3]
    assert testing.check_sample_hook(marks)[0].metadata["hooked"] is False
    assert testing.check_filter(lambda args, group: True) == [True, True]
    assert testing.check_generate(plain_generate).response == " ="
    assert len(testing.check_generate(fans_out)) == 2
    assert len(testing.check_rollout_function(answers_rollout)) == 4
    assert len(testing.check_data_source(Counting)) == 4
    assert testing.check_reward_post_process(centred)[0] == 0.5
    assert len(testing.check_conversion(same_samples)) == 2


async def forgets(args, rollout_id, data_source, *, context):
    first, _ = data_source.get_samples(2)
    return [await context.generate(first)]


async def hands_over_pending(args, rollout_id, data_source):
    return data_source.get_samples(2)


async def gives_twice(args, rollout_id, data_source, *, context):
    (group,) = data_source.get_samples(1)
    await context.generate(group)
    return [group, group]


async def repeats_a_sample(args, rollout_id, data_source, *, context):
    (group,) = data_source.get_samples(1)
    await context.generate(group)
    return [[group[0]] * 3]


async def puts_back_what_it_handed_over(args, rollout_id, data_source, *, context, kept=[]):  # noqa: B006
    data_source.add_samples(kept[:1])
    groups = [await context.generate(group) for group in data_source.get_samples(2)]
    kept[:] = groups
    return groups


async def fans_out_into_one(args, sample, sampling_params, *, context):
    await context.answer(sample)
    return [sample, sample]


class Restarts(Counting):
    def load_state_dict(self, state):
        self.at = 0


def truncates_text(args, sample):
    sample.tokens = sample.tokens[:1]
    sample.loss_mask = []


def spoils_group(args, group):
    group.clear()
    return True


async def without_log_probs(args, sample, sampling_params, *, context):
    await context.answer(sample)
    sample.rollout_log_probs = None
    return sample


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [
        (testing.check_reward, lambda args, sample: None, "a reward is a number"),
        (testing.check_reward, lambda sample: 1.0, "cannot be called as fn"),
        (testing.check_reward, lambda args, sample: {"a": 1.0}, "--reward-key"),
        (testing.check_sample_hook, lambda args, sample: 3, "expected Sample or None"),
        (testing.check_sample_hook, lambda sample: None, r"a hook takes \(args, sample\)"),
        (testing.check_sample_hook, truncates_text, "entries in loss_mask"),
        (testing.check_filter, lambda args, group: "keep", "returns a DynamicFilterOutput or a bool"),
        (testing.check_filter, spoils_group, "changed the group"),
        (testing.check_generate, not_async, "is a plain function"),
        (testing.check_generate, without_log_probs, "no rollout_log_probs"),
        (testing.check_rollout_function, forgets, "drew 1 groups in rollout 0 that it neither returned nor put back"),
        (testing.check_rollout_function, hands_over_pending, "is pending: hand over finished groups"),
        (testing.check_rollout_function, gives_twice, "returned group 0 twice"),
        (testing.check_rollout_function, repeats_a_sample, "the same sample twice"),
        (testing.check_rollout_function, puts_back_what_it_handed_over, "group 0 was put back, but this call did not"),
        (testing.check_generate, fans_out_into_one, "the same sample twice"),
        (testing.check_data_source, Lacking, "lacks state_dict"),
        (testing.check_data_source, Restarts, "goes on with other prompts"),
        (testing.check_reward_post_process, lambda args, samples: [1.0], "rewards has 1 entries, expected 6"),
        (testing.check_conversion, lambda args, samples: {}, "returned no 'tokens'"),
    ],
)
def test_every_contract_test_says_what_is_wrong(check: Any, function: Any, message: str):
    with pytest.raises(AssertionError, match=message):
        check(function)


def test_the_engine_of_the_contract_tests_is_an_engine():
    from rollout.engines.protocol import Engine

    assert isinstance(EchoEngine(), Engine)


def test_the_documented_example_passes_its_contract_tests(tmp_path: Path):
    """docs/customization.md's functions, as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "customization.md").read_text()
    code = "\n".join(block.split("```")[0] for block in text.split("```python\n")[1:])
    space: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, "docs/customization.md", "exec"), space)
    ran = [value() for name, value in list(space.items()) if name.startswith("test_")]
    assert len(ran) >= 7
    assert isinstance(example_args(), SimpleNamespace)
