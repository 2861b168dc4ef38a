import dataclasses

import numpy as np
import pytest

from samples.errors import InputError
from samples.sample import Sample, Status
from train.batch import batch_from_groups
from train.config.run import RunConfig


def sample(reward=1.0, response=(7, 8, 9), group=0, **fields) -> Sample:
    fields = {"rollout_log_probs": [-0.5] * len(response), "status": Status.COMPLETED} | fields
    return Sample(
        tokens=[1, 2, *response], response_length=len(response), reward=reward, index=3, group_index=group, **fields
    )


def config(**sections) -> RunConfig:
    return RunConfig.model_validate(sections)


def refuse(match: str, *samples: Sample, **sections) -> None:
    with pytest.raises(InputError, match=match):
        batch_from_groups([list(samples)], config(**sections))


def test_a_batch_holds_the_samples_as_columns():
    batch = batch_from_groups([[sample(1.0), sample(0.0, (5,))], [sample(0.5, group=1, weight_version=4)]], config())
    assert [t.tolist() for t in batch.tokens] == [[1, 2, 7, 8, 9], [1, 2, 5], [1, 2, 7, 8, 9]]
    assert batch.response_lengths.tolist() == [3, 1, 3]
    assert [m.tolist() for m in batch.loss_masks] == [[True] * 3, [True], [True] * 3]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.weight_versions.tolist() == [-1, -1, 4]
    assert batch.advantages[2] == 0
    assert batch.advantages[0] == -batch.advantages[1] > 0
    assert batch.rollout_log_probs is not None
    assert batch.kept_token_ids is None
    assert {f.name: getattr(batch, f.name).dtype for f in dataclasses.fields(batch) if f.name.endswith("s")
            and isinstance(getattr(batch, f.name), np.ndarray)} == {
        "response_lengths": np.int32, "rewards": np.float64, "advantages": np.float32, "group_ids": np.int32,
        "weight_versions": np.int32} | {"sample_indices": np.int64}  # fmt: skip


def test_failed_and_aborted_samples_take_no_part():
    lost = Sample(status=Status.FAILED, index=5)
    aborted = sample(None, status=Status.ABORTED, rollout_log_probs=None)
    batch = batch_from_groups([[sample(1.0), lost, sample(0.0), aborted]], config())
    alone = batch_from_groups([[sample(1.0), sample(0.0)]], config())
    assert batch.advantages[[0, 2]].tolist() == alone.advantages.tolist()
    assert batch.advantages[[1, 3]].tolist() == [0, 0]
    assert not any(batch.loss_masks[i].any() for i in (1, 3))


def test_a_removed_sample_counts_in_its_group_but_takes_no_gradient():
    batch = batch_from_groups([[sample(1.0), sample(0.0, remove_sample=True)]], config())
    assert batch.advantages[0] > 0
    assert not batch.loss_masks[1].any()


def test_a_mapping_reward_is_read_by_its_key():
    batch = batch_from_groups([[sample({"a": 2, "b": 9.0})]], config(reward={"reward_key": "a"}))
    assert batch.rewards.tolist() == [2.0]


def test_log_probabilities_may_be_left_to_the_trainer():
    groups = [[sample(rollout_log_probs=None)]]
    assert batch_from_groups(groups, config(algorithm={"use_rollout_logprobs": False})).rollout_log_probs is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused_naming_sample_and_reward(value: float):
    refuse(rf"sample 3 \(group 0\).*--rm-type exact_match.*{value}", sample(value))
    refuse("--custom-rm-path mine.score", sample(value), reward={"custom_rm_path": "mine.score"})


@pytest.mark.parametrize("value", [None, "high", {"a": 1.0}])
def test_rewards_that_are_no_numbers_are_refused(value: object):
    refuse("not a number", sample(value))


def test_rewards_too_large_to_compare_are_refused():
    refuse("too large", sample(1e308), sample(-1e308), sample(1e308))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"loss_mask": [1, 0]}, "loss_mask has 2 entries for a response of 3"),
        ({"loss_mask": [1, 0, 2]}, "0 and 1, found 2"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs has 1 entries"),
        ({"rollout_log_probs": None}, "no rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, float("nan"), -1.0]}, "nan in rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, 0.5, -1.0]}, "0.5 in rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, -float("inf"), -1.0]}, "-inf in rollout_log_probs"),
        ({"status": Status.PENDING}, "still pending"),
        ({"rollout_kept_token_ids": [[7], [8]]}, "rollout_kept_token_ids has 2 entries"),
        ({"rollout_kept_token_ids": [[7], [8], [8]]}, "token 9 at response position 2 is not among"),
    ],
)
def test_fields_that_do_not_fit_the_response_are_refused(fields: dict, match: str):
    refuse(match, sample(**fields))


def test_lengths_that_disagree_are_refused():
    refuse(
        "response_length is 9 but there are 4 tokens",
        dataclasses.replace(sample(), tokens=[1, 2, 3, 4], response_length=9, rollout_log_probs=[0.0] * 9),
    )
    refuse("no prompt token", dataclasses.replace(sample(), tokens=[7, 8, 9]))
    refuse("token ids", dataclasses.replace(sample(), tokens=[1, 2, 7, 8, 0.5]))
    refuse("token ids", dataclasses.replace(sample(), tokens=[-1, 2, 7, 8, 5]))


def test_sampling_that_was_filtered_needs_the_kept_ids():
    refuse("no rollout_kept_token_ids", sample(), rollout={"rollout_top_p": 0.9})
    refuse("no rollout_kept_token_ids", sample(), rollout={"rollout_top_k": 5})
    kept = sample(rollout_kept_token_ids=[[7, 1], [8], [9, 2, 3]])
    batch = batch_from_groups([[kept]], config(rollout={"rollout_top_p": 0.9}))
    assert batch.kept_token_ids is not None
    assert [ids.tolist() for ids in batch.kept_token_ids[0]] == [[7, 1], [8], [9, 2, 3]]


def test_no_samples_are_refused():
    with pytest.raises(InputError, match="no samples"):
        batch_from_groups([[]], config())
