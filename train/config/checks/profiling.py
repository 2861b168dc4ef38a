"""``--profile`` with steps that the run makes, and halves of them that it has."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.profiling import step_range
from train.config.run import RunConfig


def profiling_problems(config: RunConfig) -> Iterator[str]:
    profiling, debug = config.profiling, config.debug
    text = profiling.profile_steps
    if text is not None:
        steps, last = step_range(text), config.job.num_rollout - 1
        if steps is None:
            yield f"--profile-steps {text!r}: expected a step or a range of them, such as 3 or 3-5, from 0 on"
        elif profiling.profile and steps[-1] > last:
            yield (
                f"--profile-steps {text}: the run makes steps 0 to {last} (--num-rollout {config.job.num_rollout}); "
                "give some of those"
            )
    if profiling.profile and profiling.profile_what == "train" and debug.debug_rollout_only:
        yield "--profile-what train: --debug-rollout-only trains nothing to profile; leave one out"
    if profiling.profile and profiling.profile_what == "rollout" and debug.replays:
        yield "--profile-what rollout: rollouts are replayed (--load-debug-rollout-data); give --profile-what train"
