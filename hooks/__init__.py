"""What a user does to every single sample: functions given with ``--rollout-sample-hook-path``, run in order between
generation and reward. ``hooks.builtin`` holds examples that are ready to use."""

from hooks.apply import SampleHookError, SampleHooks, apply_rollout_sample_hooks, load_sample_hooks
from hooks.context import current_rollout_id, set_current_rollout_id

__all__ = [
    "SampleHookError",
    "SampleHooks",
    "apply_rollout_sample_hooks",
    "current_rollout_id",
    "load_sample_hooks",
    "set_current_rollout_id",
]
