"""Contract tests for functions of your own: call them in your tests, before a run does (docs/customization.md).

    from rollout.testing import check_reward

    def test_my_reward():
        check_reward(my_rewards.score)

Each takes the function, runs it on a few samples as a run would, and raises AssertionError that says what is wrong.
"""

from rollout.testing.checks import (
    check_data_source,
    check_filter,
    check_generate,
    check_group_reward,
    check_reward,
    check_rollout_function,
    check_sample_hook,
)
from rollout.testing.engine import EchoEngine, EchoTokenizer, example_args, example_groups
from rollout.testing.training import check_conversion, check_reward_post_process

__all__ = [
    "EchoEngine",
    "EchoTokenizer",
    "check_conversion",
    "check_data_source",
    "check_filter",
    "check_generate",
    "check_group_reward",
    "check_reward",
    "check_reward_post_process",
    "check_rollout_function",
    "check_sample_hook",
    "example_args",
    "example_groups",
]
