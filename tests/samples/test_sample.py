import json

import pytest

from samples import Sample, Status


def test_a_sample_survives_json():
    sample = Sample(
        prompt=[{"role": "user", "content": "hi"}],
        tokens=[1, 2, 3],
        response="x",
        response_length=1,
        reward={"score": 0.5},
        loss_mask=[1],
        rollout_log_probs=[-0.25],
        rollout_kept_token_ids=[[3, 4]],
        status=Status.TRUNCATED,
        metadata={"k": [1]},
    )
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_the_response_is_the_end_of_the_tokens():
    sample = Sample(tokens=[1, 2, 3], response_length=1)
    assert (sample.prompt_tokens, sample.response_tokens) == ([1, 2], [3])
    assert Sample(tokens=[1]).response_tokens == []


def test_a_reward_is_a_number_or_the_entry_that_the_key_names():
    assert Sample(reward=1).reward_value() == 1.0
    assert Sample(reward={"a": 2}).reward_value("a") == 2.0
    with pytest.raises(ValueError, match="has no reward yet"):
        Sample().reward_value()
    with pytest.raises(ValueError, match="set --reward-key"):
        Sample(reward={"a": 2}).reward_value()
    with pytest.raises(ValueError, match=r"--reward-key 'b': .* \['a'\]"):
        Sample(reward={"a": 2}).reward_value("b")


def test_an_adjustment_is_added_to_the_reward_once():
    sample = Sample(reward=1.0, reward_adjustment=-0.25)
    sample.apply_reward_adjustment()
    sample.apply_reward_adjustment()
    assert sample.reward == 0.75
    mapping = Sample(reward={"score": 1.0, "other": 3}, reward_adjustment=-0.25)
    mapping.apply_reward_adjustment("score")
    assert mapping.reward == {"score": 0.75, "other": 3}
    unscored = Sample(reward_adjustment=-0.25)
    unscored.apply_reward_adjustment()
    assert (unscored.reward, unscored.reward_adjustment) == (None, -0.25)
