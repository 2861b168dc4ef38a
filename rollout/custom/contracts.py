"""The functions that a user can give by path: what each is called with, in one place (docs/customization.md)."""

from __future__ import annotations

from samples.signatures import Contract

GENERATE = Contract(
    "--custom-generate-function-path",
    positional=("args", "sample", "sampling_params"),
    keywords=("context", "evaluation"),
    example="generate(args, sample, sampling_params, *, context, evaluation)",
    must_be_async=True,
)
GROUP_REWARD = Contract(
    "--custom-rm-path with --group-rm",
    positional=("args", "samples"),
    keywords=(),
    example="reward(args, samples)",
)
ROLLOUT = Contract(
    "--rollout-function-path",
    positional=("args", "rollout_id", "data_source"),
    keywords=("context", "evaluation"),
    example="generate_rollout(args, rollout_id, data_source, *, context)",
    must_be_async=True,
)
REWARD_POST_PROCESS = Contract(
    "--custom-reward-post-process-path",
    positional=("args", "samples"),
    keywords=(),
    example="post_process(args, samples)",
    must_be_plain=True,
)
CONVERT = Contract(
    "--custom-convert-samples-to-train-data-path",
    positional=("args", "samples"),
    keywords=(),
    example="convert(args, samples)",
    must_be_plain=True,
)
FILTER = Contract(
    "--dynamic-sampling-filter-path",
    positional=("args", "group"),
    keywords=(),
    example="keep(args, group)",
    must_be_plain=True,
)
