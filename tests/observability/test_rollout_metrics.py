import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.rollout_metrics import BoundedNames, RolloutMetrics, rollout_metrics
from samples.sample import Sample, Status


def sample(reward, length=4, status=Status.COMPLETED, source=None):
    return Sample(reward=reward, response_length=length, status=status, source=source)


def test_raw_reward_and_lengths_are_over_every_sampled_response():
    metrics = rollout_metrics([[sample(1.0, 2), sample(0.0, 4)], [sample(0.5, 9, Status.TRUNCATED), sample(0.5, 1)]])
    assert metrics == {
        "rollout/num_groups": 2,
        "rollout/num_samples": 4,
        "rollout/response_tokens": 16,
        "rollout/raw_reward": 0.5,
        "rollout/response_len/mean": 4.0,
        "rollout/response_len/min": 1,
        "rollout/response_len/max": 9,
        "rollout/truncated_ratio": 0.25,
        "rollout/aborted_ratio": 0.0,
        "rollout/failed_ratio": 0.0,
        "rollout/zero_spread_ratio": 0.5,
    }


def test_unscored_samples_count_but_have_no_part_in_the_reward():
    metrics = rollout_metrics(
        [[sample(1.0), sample(None, status=Status.FAILED)], [sample(None, status=Status.ABORTED)]]
    )
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/failed_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/zero_spread_ratio"] == 1.0


def test_nothing_sampled_gives_counts_and_no_mean_over_nothing():
    assert rollout_metrics([]) == {"rollout/num_groups": 0, "rollout/num_samples": 0, "rollout/response_tokens": 0}
    assert "rollout/raw_reward" not in rollout_metrics([[sample(None)]])


def test_mapping_rewards_are_read_through_the_reward_key():
    metrics = rollout_metrics([[sample({"acc": 1.0, "len": 7}), sample({"acc": 0.0})]], reward_key="acc")
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/zero_spread_ratio"] == 0.0


def test_groups_whose_members_fanned_out_into_lists_are_flattened():
    metrics = rollout_metrics([[[sample(1.0), sample(0.0)], [sample(0.0), [sample(1.0)]]]])
    assert metrics["rollout/num_groups"] == 1
    assert metrics["rollout/num_samples"] == 4
    assert metrics["rollout/raw_reward"] == 0.5


def test_metrics_by_source_only_for_samples_that_name_one():
    metrics = rollout_metrics([[sample(1.0, 2, source="sums")], [sample(0.0, 6, source="sums")], [sample(0.5)]])
    assert metrics["rollout/source/sums/raw_reward"] == 0.5
    assert metrics["rollout/source/sums/response_len/mean"] == 4.0
    assert metrics["rollout/source/sums/num_samples"] == 2
    assert {key.split("/")[2] for key in metrics if key.startswith("rollout/source/")} == {"sums"}


def test_filter_counts_and_counters_have_their_places():
    metrics = rollout_metrics(
        [], dynamic_filter={"groups_kept": 3}, drop_reasons={"zero spread": 2}, counters={"reward/retries": 1}
    )
    assert metrics["rollout/dynamic_filter/groups_kept"] == 3
    assert metrics["rollout/dynamic_filter/drop/zero_spread"] == 2
    assert metrics["rollout/reward/retries"] == 1


def test_sources_beyond_the_bound_are_other_and_known_ones_keep_their_key_over_steps():
    of = RolloutMetrics(max_names=2)
    of([[sample(1.0, source="a"), sample(1.0, source="b")]])
    metrics = of([[sample(1.0, source="c"), sample(0.0, source="d"), sample(1.0, source="b")]])
    assert metrics["rollout/source/other/raw_reward"] == 0.5
    assert metrics["rollout/source/b/raw_reward"] == 1.0


def test_filter_reasons_beyond_the_bound_add_up_under_other():
    of = RolloutMetrics(max_names=1)
    metrics = of([], drop_reasons={"zero_std": 1, "x": 2, "y": 3})
    assert metrics["rollout/dynamic_filter/drop/zero_std"] == 1
    assert metrics["rollout/dynamic_filter/drop/other"] == 5


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=100), max_size=200))
def test_any_names_become_a_bounded_number_of_clean_keys(names):
    book = BoundedNames()
    keys = {book.key(name) for name in names}
    assert len(keys) <= 33
    for key in keys:
        assert 0 < len(key) <= 64
        assert not set(key) & set("/ \n\t")
    assert [book.key(name) for name in names] == [book.key(name) for name in names]
