"""Which groups of samples are worth training on. A filter is ``filter(args, group, **kwargs)``, given by path with
``--dynamic-sampling-filter-path``; those here can be named as ``filters.check_reward_nonzero_std`` and so on."""

from filters.output import (
    DynamicFilterOutput,
    all_of,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
    with_fallback,
)
from filters.responses import (
    check_response_length,
    check_truncation,
    response_length_between,
    truncated_at_most,
)
from filters.rewards import (
    check_correctness_band,
    check_reward_mean_range,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    correctness_between,
    reward_mean_between,
)

__all__ = [
    "DynamicFilterOutput",
    "all_of",
    "call_dynamic_filter",
    "check_correctness_band",
    "check_response_length",
    "check_reward_mean_range",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
    "check_truncation",
    "correctness_between",
    "response_length_between",
    "reward_mean_between",
    "should_drop_dynamic_filter_output",
    "truncated_at_most",
    "with_fallback",
]
