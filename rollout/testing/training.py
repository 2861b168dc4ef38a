"""Contract tests of the functions that stand between the rollout and the training batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from rollout.custom.contracts import CONVERT, REWARD_POST_PROCESS
from rollout.custom.training import converted, post_processed
from rollout.testing.checks import _bound, _flat, _later, _name, _run
from rollout.testing.engine import example_args, example_groups
from samples.sample import Group
from samples.signatures import bind_function


def check_reward_post_process(
    function: Callable[..., Any], groups: Sequence[Group] | None = None, **settings: Any
) -> list[float]:
    """``--custom-reward-post-process-path``: a finite number for each sample, and the samples as they were. Returns
    the numbers."""
    samples = _flat(groups if groups is not None else example_groups(scored=True))
    bound = _bound(lambda: bind_function(_name(function), function, REWARD_POST_PROCESS))
    before = copy.deepcopy(samples)
    values: list[float] = _run(_later(lambda: post_processed(bound, example_args(**settings), samples)))
    assert samples == before, f"{_name(function)} changed the samples; it is to return numbers only"
    return values


def check_conversion(
    function: Callable[..., Any], groups: Sequence[Group] | None = None, **settings: Any
) -> list[Group]:
    """``--custom-convert-samples-to-train-data-path``: columns that fit each other. Returns the groups they mean."""
    given = list(groups) if groups is not None else example_groups(scored=True)
    samples = _flat(given)
    ids = [number for number, group in enumerate(given) for _ in group]
    bound = _bound(lambda: bind_function(_name(function), function, CONVERT))
    made: list[Group] = _run(_later(lambda: converted(bound, example_args(**settings), samples, ids)[0]))
    for sample in _flat(made):
        assert 0 <= sample.response_length < len(sample.tokens), (
            f"{_name(function)} gave an entry with response_length {sample.response_length} and {len(sample.tokens)} "
            "tokens; a prompt token comes before the response"
        )
        for name, values in (("loss_masks", sample.loss_mask), ("rollout_log_probs", sample.rollout_log_probs)):
            assert values is None or len(values) == sample.response_length, (
                f"{_name(function)} gave {len(values)} entries in {name} for a response of {sample.response_length} "
                "tokens"
            )
    return made
