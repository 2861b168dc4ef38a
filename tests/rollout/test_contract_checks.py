"""The contract tests that a user can import (rollout.testing): what keeps a contract passes, what breaks it is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import testing
from rollout.testing import EchoEngine, example_args
from tests.rollout.custom_cases import (
    Counting,
    Lacking,
    answers_rollout,
    centred,
    fans_out,
    marks,
    not_async,
    plain_generate,
    ranked,
    same_samples,
)


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
