"""From the settings to the reward they name; everything that can be checked without a sample is checked here."""

from __future__ import annotations

from rollout.config import RewardConfig
from rollout.rewards.base import Reward
from rollout.rm_types import check_rm_type


def build_reward(config: RewardConfig, args: object) -> Reward:
    """The reward of ``--custom-rm-path``, else of ``--rm-type``.

    ``args`` is what a custom function gets as its first argument. Raises ``InputError`` naming the flag for a type,
    task, address or function that cannot be used. The imports are here so that a run pays only for its own reward.
    """
    if config.custom_rm_path:
        from rollout.rewards.custom import CustomReward
        from rollout.rewards.custom_group import CustomGroupReward
        from samples.loading import load_function

        function = load_function(config.custom_rm_path, "--custom-rm-path", config.user_code_dir)
        made = CustomGroupReward if config.group_rm else CustomReward
        return made(
            function,
            config.custom_rm_path,
            args,
            timeout=config.rm_timeout,
            concurrency=config.rm_concurrency,
            reward_key=config.reward_key,
        )
    kind, task = check_rm_type(config.rm_type)
    if kind == "exact_match":
        from rollout.rewards.exact_match import ExactMatchReward

        return ExactMatchReward()
    if kind == "remote_rm":
        from rollout.rewards.remote import RemoteReward

        return RemoteReward(
            config.rm_url,
            timeout=config.rm_timeout,
            concurrency=config.rm_concurrency,
            retries=config.rm_retries,
            reward_key=config.reward_key,
        )
    from rollout.rewards.verifiers import MathReward, ReasoningGymReward

    if kind == "math":
        return MathReward(timeout=config.rm_timeout, concurrency=config.rm_concurrency)
    return ReasoningGymReward(task, timeout=config.rm_timeout, concurrency=config.rm_concurrency)
