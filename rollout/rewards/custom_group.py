"""``--custom-rm-path`` with ``--group-rm``: one call scores all samples of a group, ``fn(args, samples)``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from rollout.custom.contracts import GROUP_REWARD
from rollout.rewards.base import RewardError
from rollout.rewards.custom import CustomReward, Function
from rollout.rewards.values import checked_reward
from samples.errors import InputError
from samples.sample import Group, Sample
from samples.sample import Reward as RewardValue
from samples.signatures import bind_function


class CustomGroupReward(CustomReward):
    """Calls the function once a group, as ``CustomReward`` calls one a sample. It gives a reward for each sample, in
    order; of a response that fanned out, each sample is one."""

    compares = True

    def __init__(
        self, function: Function, path: str, args: object, *, timeout: float, concurrency: int, reward_key: str | None
    ) -> None:
        bind_function(path, function, GROUP_REWARD)
        super().__init__(function, path, args, timeout=timeout, concurrency=concurrency, reward_key=reward_key)

    async def score(self, sample: Sample) -> RewardValue:
        return (await self.score_group([sample]))[0]

    async def score_group(self, group: Group) -> list[RewardValue]:
        if not group:
            return []
        if self._closed:
            raise RewardError(f"{self.name}: sample {group[0].index} came after the reward was closed")
        values = await self._tracked(self._call(group), group[0])
        for sample, value in zip(group, self._one_each(values, group), strict=True):
            sample.reward = checked_reward(value, self.name, sample.index, self._reward_key)
        return [sample.reward for sample in group if sample.reward is not None]

    def _one_each(self, values: object, group: Group) -> list[object]:
        told = f"{self.name} --group-rm"
        if isinstance(values, np.ndarray | torch.Tensor):
            values = values.tolist()
        if isinstance(values, str | dict) or not isinstance(values, Iterable):
            raise InputError(
                f"{told} returned {type(values).__name__} for group {group[0].group_index}: expected a list with a "
                "reward for each sample"
            )
        rewards = list(values)
        if len(rewards) != len(group):
            raise InputError(
                f"{told} returned {len(rewards)} rewards for the {len(group)} samples of group "
                f"{group[0].group_index}: expected one for each, in order"
            )
        return rewards
