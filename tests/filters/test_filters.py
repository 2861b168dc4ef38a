import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import filters
from filters import (
    DynamicFilterOutput,
    all_of,
    call_dynamic_filter,
    check_correctness_band,
    check_response_length,
    check_reward_mean_range,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    check_truncation,
    correctness_between,
    response_length_between,
    reward_mean_between,
    should_drop_dynamic_filter_output,
    truncated_at_most,
    with_fallback,
)
from samples import Sample, Status, load_function

ARGS = types.SimpleNamespace(reward_key=None)


def group_of(*rewards, **values) -> list[Sample]:
    return [Sample(index=i, group_index=4, reward=reward, **values) for i, reward in enumerate(rewards)]


# What a verdict means


@pytest.mark.parametrize(
    ("keep", "keep_when_insufficient", "remaining", "target", "dropped"),
    [
        (True, False, 9, 4, False),
        (True, True, 4, 4, False),
        (False, False, 9, 4, True),
        (False, False, 4, 4, True),
        (False, True, 5, 4, True),
        (False, True, 4, 4, False),
        (False, True, 3, 4, False),
    ],
)
def test_a_rejected_group_stays_only_if_it_may_and_is_needed(keep, keep_when_insufficient, remaining, target, dropped):
    output = DynamicFilterOutput(keep, "why", keep_when_insufficient)
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=target) is dropped


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float64(2) > 1, torch.tensor(2.0) > 1])
def test_a_bare_truth_value_is_a_verdict(value):
    assert call_dynamic_filter(lambda args, group: value, ARGS, []) == DynamicFilterOutput(keep=True)
    output = call_dynamic_filter(lambda args, group: DynamicFilterOutput(keep=value), ARGS, [])
    assert output.keep is True
    assert not should_drop_dynamic_filter_output(value, remaining_batch_size=9, target_data_size=1)


@pytest.mark.parametrize("value", [None, 1, "keep", (True, "why")])
def test_any_other_verdict_names_the_filter(value):
    def my_filter(args, group):
        return value

    with pytest.raises(TypeError, match=r"my_filter returned .*DynamicFilterOutput or a bool"):
        call_dynamic_filter(my_filter, ARGS, group_of(1.0))


def test_an_error_in_a_filter_is_raised_as_it_is_with_filter_and_group_noted():
    def my_filter(args, group):
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone") as caught:
        call_dynamic_filter(my_filter, ARGS, group_of(1.0))
    assert "my_filter" in caught.value.__notes__[0]
    assert "group 4" in caught.value.__notes__[0]


def test_no_filter_keeps_every_group():
    assert call_dynamic_filter(None, ARGS, group_of(0.0, 0.0)).keep


def test_keyword_arguments_reach_the_filter():
    seen = {}
    call_dynamic_filter(lambda args, group, **kwargs: bool(seen.update(kwargs)) or True, ARGS, [], rollout_id=3)
    assert seen == {"rollout_id": 3}


# Spread


def test_groups_whose_rewards_differ_are_kept():
    assert check_reward_nonzero_std(ARGS, group_of(0.0, 1.0)) == DynamicFilterOutput(keep=True)


@pytest.mark.parametrize(("reward", "reason"), [(0.0, "zero_std_0.0"), (1.0, "zero_std_1.0"), (0.37, "zero_std_other")])
def test_groups_without_spread_are_rejected_whatever_their_mean(reward, reason):
    assert check_reward_nonzero_std(ARGS, group_of(*[reward] * 8)) == DynamicFilterOutput(False, reason)


def test_the_fallback_allows_what_the_strict_filter_does_not():
    group = group_of(0.0, 0.0)
    assert not check_reward_nonzero_std(ARGS, group).keep_when_insufficient
    output = check_reward_nonzero_std_with_fallback(ARGS, group)
    assert (output.keep, output.keep_when_insufficient, output.reason) == (False, True, "zero_std_0.0")
    assert check_reward_nonzero_std_with_fallback(ARGS, group_of(0.0, 1.0)) == DynamicFilterOutput(keep=True)


def test_a_group_of_one_is_rejected_by_name():
    assert check_reward_nonzero_std(ARGS, group_of(1.0)).reason == "group_of_one"
    assert check_reward_nonzero_std_with_fallback(ARGS, group_of(1.0)).keep_when_insufficient


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 40))
def test_equal_rewards_have_no_spread_at_any_size(reward, n):
    assert not check_reward_nonzero_std(ARGS, group_of(*[reward] * n)).keep


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_spread_is_the_standard_deviation(rewards):
    reference = np.std(np.array(rewards, dtype=np.longdouble), ddof=1)
    if abs(reference - 1e-6) > 1e-9:
        assert check_reward_nonzero_std(ARGS, group_of(*rewards)).keep == (reference > 1e-6)


def test_mapping_rewards_are_read_by_reward_key():
    group = [Sample(reward={"score": value, "other": 0.5}) for value in (0.0, 1.0)]
    assert check_reward_nonzero_std(types.SimpleNamespace(reward_key="score"), group).keep
    assert not check_reward_nonzero_std(types.SimpleNamespace(reward_key="other"), group).keep
    with pytest.raises(ValueError, match="--reward-key"):
        check_reward_nonzero_std(ARGS, group)
    with pytest.raises(ValueError, match=r"--reward-key 'absent'.*other.*score"):
        check_reward_nonzero_std(types.SimpleNamespace(reward_key="absent"), group)


def test_members_that_fanned_out_into_lists_are_looked_into():
    group = [group_of(1.0, 1.0), group_of(0.0, 0.0, 0.0)]
    assert check_reward_nonzero_std(ARGS, group).keep
    assert not check_reward_nonzero_std(ARGS, [group_of(1.0, 1.0), group_of(1.0)]).keep


def test_samples_without_reward_do_not_count_and_a_group_of_them_is_unusable():
    assert check_reward_nonzero_std(ARGS, group_of(None, 0.0, 1.0)).keep
    assert check_reward_nonzero_std(ARGS, group_of(None, 1.0, 1.0)).reason == "zero_std_1.0"
    output = check_reward_nonzero_std_with_fallback(ARGS, group_of(None, None))
    assert output == DynamicFilterOutput(False, "no_reward", keep_when_insufficient=False)
    assert check_reward_nonzero_std(ARGS, []).reason == "no_reward"


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_failed_and_aborted_samples_do_not_make_a_spread(status):
    group = [*group_of(1.0, 1.0), Sample(reward=0.0, status=status)]
    assert check_reward_nonzero_std(ARGS, group).reason == "zero_std_1.0"


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_that_are_no_number_are_never_kept_by_fallback(reward):
    output = check_reward_nonzero_std_with_fallback(ARGS, group_of(0.0, reward))
    assert output == DynamicFilterOutput(False, "nonfinite_reward", keep_when_insufficient=False)


# Means, correctness, lengths, truncation


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.0,) * 19 + (1.0,), "reward_mean_low"),
        ((1.0,) * 19 + (0.0,), "reward_mean_high"),
        ((0.5, 0.5), "zero_std_other"),
    ],
)
def test_the_mean_filter_asks_for_spread_too(rewards, reason):
    assert check_reward_mean_range(ARGS, group_of(*rewards)).reason == reason


def test_the_mean_weighs_members_not_the_samples_they_fanned_out_into():
    group = [group_of(1.0), group_of(0.0, 0.0, 0.0, 0.0, 0.0)]
    assert reward_mean_between(0.5, 0.5)(ARGS, group).keep


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 0.0), None), ((1.0,) * 4, "correctness_high"), ((0.9,) * 4, "correctness_low"), ((), "no_reward")],
)
def test_the_correctness_band_counts_correct_responses(rewards, reason):
    assert check_correctness_band(ARGS, group_of(*rewards)).reason == reason


def test_a_response_without_reward_is_not_correct():
    assert correctness_between(0.5, 0.5)(ARGS, group_of(1.0, None)).keep
    assert correctness_between(0, 1, correct_at=0.5)(ARGS, group_of(0.5)).keep


def test_lengths_are_judged_by_their_mean():
    between = response_length_between(2, 4)
    reasons = [between(ARGS, group_of(1.0, response_length=n)).reason for n in (1, 2, 4, 5)]
    assert reasons == ["response_too_short", None, None, "response_too_long"]
    assert check_response_length(ARGS, group_of(1.0, response_length=0)).reason == "response_too_short"
    assert check_response_length(ARGS, []).reason == "response_too_short"


def test_truncated_responses_are_counted_across_fanned_out_members():
    cut, whole = Sample(status=Status.TRUNCATED), Sample(status=Status.COMPLETED)
    assert check_truncation(ARGS, [cut, whole]).keep
    assert check_truncation(ARGS, [[cut, cut], whole]).reason == "truncated"
    assert truncated_at_most(0)(ARGS, [cut]).reason == "truncated"


# Putting filters together


def test_filters_can_be_combined_and_given_a_fallback():
    combined = with_fallback(all_of(check_truncation, check_reward_nonzero_std))
    assert combined(ARGS, group_of(0.0, 1.0)).keep
    assert combined(ARGS, group_of(0.0, 0.0)) == DynamicFilterOutput(False, "zero_std_0.0", True)
    assert combined(ARGS, group_of(0.0, 1.0, status=Status.TRUNCATED)) == DynamicFilterOutput(False, "truncated", True)


@pytest.mark.parametrize("name", [name for name in filters.__all__ if name.startswith("check_")])
def test_every_named_filter_can_be_given_by_path(name):
    function = load_function(f"filters.{name}", "--dynamic-sampling-filter-path")
    assert isinstance(call_dynamic_filter(function, ARGS, group_of(0.0, 1.0), rollout_id=0), DynamicFilterOutput)


@given(st.lists(st.sampled_from([0.0, 1.0, 0.1, 0.25, float("nan"), None]), max_size=6))
def test_the_built_in_filters_have_few_reasons(rewards):
    names = [name for name in filters.__all__ if name.startswith("check_")]
    outputs = [getattr(filters, name)(ARGS, group_of(*rewards)) for name in names]
    assert all((output.reason is None) == output.keep for output in outputs)
    assert all(output.reason in KNOWN_REASONS for output in outputs)


KNOWN_REASONS = {
    *(None, "no_reward", "nonfinite_reward", "group_of_one", "zero_std_0.0", "zero_std_1.0", "zero_std_other"),
    *("reward_mean_low", "reward_mean_high", "correctness_low", "correctness_high"),
    *("response_too_short", "response_too_long", "truncated"),
}
