import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.advantages import STD_EPS, group_advantages

rewards_in_groups = st.lists(
    st.lists(st.floats(-1e6, 1e6, allow_nan=False, width=32), min_size=1, max_size=6), min_size=1, max_size=5
)


def advantages(groups: list[list[float]], *, std: bool = True, counted: list[bool] | None = None) -> np.ndarray:
    rewards = np.array([r for group in groups for r in group])
    ids = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups])
    mask = np.ones(len(rewards), bool) if counted is None else np.array(counted)
    return group_advantages(rewards, ids, mask, normalize_std=std)


def test_a_group_is_normalised_by_its_own_mean_and_unbiased_deviation():
    groups = [[1.0, 0.0, 0.0, 1.0, 1.0], [3.0, -2.0]]
    expected = [(r - statistics.fmean(group)) / (statistics.stdev(group) + STD_EPS) for group in groups for r in group]
    np.testing.assert_allclose(advantages(groups), expected, rtol=1e-6)


def test_mean_only_keeps_the_scale_of_the_rewards():
    np.testing.assert_allclose(advantages([[4.0, 0.0, 2.0]], std=False), [2.0, -2.0, 0.0])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("group", [[0.7], [0.1, 0.1, 0.1], [1e9 + 0.1] * 7])
def test_groups_without_spread_have_advantage_zero(group: list[float], std: bool):
    assert advantages([group], std=std).tolist() == [0.0] * len(group)


def test_responses_that_do_not_count_change_nothing_for_the_others():
    with_failed = advantages([[1.0, 0.0, 99.0], [5.0]], counted=[True, True, False, False])
    np.testing.assert_array_equal(with_failed, [*advantages([[1.0, 0.0]]), 0.0, 0.0])


@given(rewards_in_groups, st.booleans())
def test_advantages_are_finite_and_sum_to_zero_in_each_group(groups: list[list[float]], std: bool):
    result = advantages(groups, std=std)
    assert np.isfinite(result).all()
    start = 0
    for group in groups:
        part = result[start : start + len(group)].astype(np.float64)
        start += len(group)
        assert abs(part.sum()) <= 1e-5 * (1 + np.abs(part).max()) * len(group)


@given(rewards_in_groups)
def test_a_group_alone_gets_what_it_gets_among_others(groups: list[list[float]]):
    together = advantages(groups)
    alone = np.concatenate([advantages([group]) for group in groups])
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-9)
