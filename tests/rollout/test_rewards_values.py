import math

import numpy as np
import pytest
import torch

from rollout.rewards.values import checked_reward
from samples.errors import InputError


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0), torch.tensor(True)],
)
def test_every_kind_of_number_becomes_a_float(value):
    reward = checked_reward(value, "rm", 3, None)
    assert reward == 1.0
    assert type(reward) is float


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, -math.inf, "1.0", [1.0], np.ones(1), torch.ones(1), torch.tensor(math.nan), 10**400, 1j],
)
def test_what_is_no_finite_number_is_refused_with_function_sample_and_value(value):
    with pytest.raises(InputError) as refused:
        checked_reward(value, "--custom-rm-path my.rm", 7, None)
    message = str(refused.value)
    assert "--custom-rm-path my.rm" in message
    assert "sample 7" in message
    assert repr(value)[:100] in message


def test_a_mapping_keeps_its_other_entries_and_becomes_plain():
    reward = checked_reward({"score": np.float64(0.5), "format": torch.tensor(1), "why": "ok"}, "rm", 0, "score")
    assert reward == {"score": 0.5, "format": 1.0, "why": "ok"}
    assert all(type(reward[key]) is float for key in ("score", "format"))


def test_a_mapping_without_reward_key_is_refused_with_its_keys():
    with pytest.raises(InputError, match=r"rm .* sample 2, with the keys 'acc', 'len'.*--reward-key"):
        checked_reward({"acc": 1.0, "len": 3}, "rm", 2, None)


def test_a_mapping_that_lacks_the_reward_key_is_refused_with_its_keys():
    with pytest.raises(InputError, match=r"--reward-key 'score'.* sample 2; its keys are 'acc'"):
        checked_reward({"acc": 1.0}, "rm", 2, "score")


@pytest.mark.parametrize("value", [None, math.nan, "good", {"nested": 1}])
def test_a_bad_entry_under_the_reward_key_is_refused(value):
    with pytest.raises(InputError, match="'score' for sample 2"):
        checked_reward({"score": value}, "rm", 2, "score")


def test_a_number_is_accepted_beside_a_reward_key():
    assert checked_reward(1, "rm", 0, "score") == 1.0
