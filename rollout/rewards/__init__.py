"""Rewards: a finished response in, a number (or a mapping of numbers) out."""

from rollout.rewards.base import Reward, RewardError
from rollout.rewards.factory import build_reward

__all__ = ["Reward", "RewardError", "build_reward"]
