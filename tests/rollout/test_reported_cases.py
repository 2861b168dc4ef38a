"""What users of such systems reported about rewards, filters, hooks and rollouts: a test a case, which its name and
docstring tell. The number is that of the public tracker."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import filters
from filters import call_dynamic_filter
from hooks.builtin import length_penalty
from observability.rollout_metrics import rollout_metrics
from observability.transcripts import pick_transcripts
from rollout.config import RolloutConfig
from rollout.evaluation import evaluation_metrics
from rollout.rewards import RewardError
from rollout.rewards.custom import CustomReward
from rollout.testing import example_args, example_groups
from samples import InputError, Status
from samples.sample import Sample
from tests.rollout.test_sync_first_come import SlowEngine, setup, slow_groups
from train.batch import batch_from_groups
from train.config.cli import parse
from train.config.run import RunConfig
from train.losses import clipped_surrogate


def test_openrlhf_1270_a_filter_by_mean_lets_no_group_without_spread_pass():
    (group,) = example_groups(1, 4, scored=True)
    for sample in group:
        sample.reward = 0.5  # in the middle of the band, and nothing to learn from
    for name in ("check_reward_mean_range", "check_reward_nonzero_std"):
        assert not call_dynamic_filter(getattr(filters, name), example_args(), group).keep


def test_slime_275_a_mapping_reward_is_read_by_reward_key_everywhere():
    groups = example_groups(scored=True)
    for sample in [sample for group in groups for sample in group]:
        sample.reward = {"acc": sample.reward, "format": 1.0}
    key = "acc"
    args = example_args(reward_key=key)
    for name in [name for name in filters.__all__ if name.startswith("check_")]:
        call_dynamic_filter(getattr(filters, name), args, groups[0])
    assert call_dynamic_filter(filters.check_reward_nonzero_std, args, groups[0]).keep
    assert not call_dynamic_filter(filters.check_reward_nonzero_std, example_args(reward_key="format"), groups[0]).keep
    assert rollout_metrics(groups, reward_key=key)["rollout/raw_reward"] < 1.0
    assert evaluation_metrics("held_out", groups, reward_key=key)["eval/held_out"] < 1.0
    assert pick_transcripts(groups, 2, key)[0]["reward"] == 1.0
    config = RunConfig.model_validate({"reward": {"reward_key": key}})
    assert sorted(set(batch_from_groups(groups, config).rewards.tolist())) == [0.0, 1.0]
    length_penalty(free_tokens=0, per_token=0.5)(args, groups[0][0])
    groups[0][0].apply_reward_adjustment(key)
    assert groups[0][0].reward["acc"] == 0.5


async def test_slime_2176_a_slow_reward_call_does_not_block_shutdown():
    release = threading.Event()

    def slow(args: Any, sample: Sample) -> float:
        release.wait(60)
        return 0.0

    async def slower(args: Any, sample: Sample) -> float:
        await asyncio.sleep(60)
        return 0.0

    for function in (slow, slower):
        reward = CustomReward(function, "m.slow", None, timeout=60, concurrency=4, reward_key=None)
        scoring = [asyncio.ensure_future(reward.score(Sample(index=i))) for i in range(8)]
        await asyncio.sleep(0.01)
        began = time.monotonic()
        await reward.close()
        results = await asyncio.gather(*scoring, return_exceptions=True)
        assert all(isinstance(result, RewardError) for result in results)
        assert time.monotonic() - began < 30  # not the minute that the calls take
    release.set()


async def test_miles_1012_and_slime_2350_the_error_of_one_task_surfaces_and_its_siblings_are_cancelled():
    cancelled: list[int] = []

    class Broken(SlowEngine):
        async def generate(self, request: Any) -> Any:
            if request.sample_index == 3:
                await asyncio.sleep(0)
                raise ConnectionError("the fourth sample broke")
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                cancelled.append(request.sample_index)
                raise

    for over in (None, 4):
        cancelled.clear()
        made = setup(engine=Broken(slow_groups(0, 1, 2, 3)), over_sampling_batch_size=over)
        with pytest.raises(ConnectionError, match="the fourth sample broke"):
            await made.collect(0)
        assert cancelled
        assert len(asyncio.all_tasks()) == 1


def test_slime_179_the_importance_ratio_is_that_of_the_policy_that_answered():
    """ratio = exp(trainer's log-probability - the rollout's), token by token."""
    groups = example_groups(scored=True)
    batch = batch_from_groups(groups, RunConfig())
    assert batch.rollout_log_probs is not None
    rollout = torch.from_numpy(np.concatenate(batch.rollout_log_probs))
    trainer = rollout + 0.1
    _, ratio, _ = clipped_surrogate(trainer, rollout, torch.ones_like(rollout), eps_low=0.2, eps_high=0.2)
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(0.1)))


def test_slime_1440_a_mask_takes_the_tokens_that_it_names_and_no_others():
    groups = example_groups(scored=True)
    groups[0][1].loss_mask = [0, 0, 1, 1, 1]
    batch = batch_from_groups(groups, RunConfig())
    assert batch.loss_masks[1].tolist() == [False, False, True, True, True]
    assert all(mask.all() for number, mask in enumerate(batch.loss_masks) if number != 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n-samples-per-prompt", "1"], r"--n-samples-per-prompt 1: .*use at least 2"),
        (["--rollout-batch-size", "3", "--n-samples-per-prompt", "2", "--global-batch-size", "4"], r"does not divide"),
        (["--num-rollout", "0"], r"--num-rollout"),
    ],
)
def test_trl_3199_verl_559_slime_2366_sizes_that_do_not_fit_name_the_inputs_and_a_value_that_works(flags, message):
    with pytest.raises(InputError, match=message):
        parse(flags)


def test_prime_rl_3090_and_slime_2297_temperature_zero_is_refused_when_arguments_are_parsed():
    with pytest.raises(InputError, match="--rollout-temperature"):
        parse(["--rollout-temperature", "0"])
    with pytest.raises(ValueError, match="rollout_temperature"):
        RolloutConfig(rollout_temperature=0.0)


def test_uneven_groups_are_normalised_within_themselves_and_removed_samples_take_no_gradient():
    first, second = example_groups(2, 3, scored=True)
    first[0].remove_sample = True
    second.append(Sample(**vars(second[0]) | {"reward": 3.0}))
    second[1].status = Status.FAILED
    batch = batch_from_groups([first, second], RunConfig())
    assert batch.group_ids.tolist() == [0] * 3 + [1] * 4
    rewards = np.array([sample.reward for sample in second])[[0, 2, 3]]
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(batch.advantages[[3, 5, 6]], expected, rtol=1e-6)
    assert batch.advantages[4] == 0.0
    assert not batch.loss_masks[0].any()
    assert batch.advantages[0] != 0.0  # its reward counts among the others, and stays in the statistics
