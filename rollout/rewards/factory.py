"""From the settings to the reward they name; everything that can be checked without a sample is checked here."""

from __future__ import annotations

from difflib import get_close_matches

from rollout.config import RewardConfig
from rollout.rewards.base import Reward
from samples.errors import InputError

RM_TYPES = ("exact_match", "math", "reasoning_gym", "remote_rm")


def build_reward(config: RewardConfig, args: object) -> Reward:
    """The reward of ``--custom-rm-path``, else of ``--rm-type``.

    ``args`` is what a custom function gets as its first argument. Raises ``InputError`` naming the flag for a type,
    task, address or function that cannot be used. The imports are here so that a run pays only for its own reward.
    """
    if config.custom_rm_path:
        from samples.loading import load_function

        from rollout.rewards.custom import CustomReward

        function = load_function(config.custom_rm_path, "--custom-rm-path", config.user_code_dir)
        return CustomReward(
            function,
            config.custom_rm_path,
            args,
            timeout=config.rm_timeout,
            concurrency=config.rm_concurrency,
            reward_key=config.reward_key,
        )
    kind, colon, task = config.rm_type.partition(":")
    if kind not in RM_TYPES or (colon and (kind != "reasoning_gym" or not task)):
        raise InputError(
            f"--rm-type {config.rm_type!r} is not known{_nearest(kind)}: choose {', '.join(RM_TYPES)} "
            "(reasoning_gym:TASK names a task), or give a function with --custom-rm-path"
        )
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
    return ReasoningGymReward(task or None, timeout=config.rm_timeout, concurrency=config.rm_concurrency)


def _nearest(kind: str) -> str:
    near = get_close_matches(kind, RM_TYPES, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
