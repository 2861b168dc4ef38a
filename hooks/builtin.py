"""Hooks that are ready to use, and short enough to be copied.

``tag_with_source``, ``redact_secrets``, ``penalise_length`` and ``log_transcripts`` can be given by path
(``--rollout-sample-hook-path hooks.builtin.tag_with_source``). For other settings make one in a module of your own,
``redact_names = redact(r"\\bAda\\b")``, and give the path of that.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

from samples import Sample

SampleHook = Callable[..., Sample | None]
_log = logging.getLogger(__name__)


def tag_with_source(_args: Any, sample: Sample) -> None:
    """Notes in the metadata which policy wrote the response to which source's prompt, and in which rollout."""
    sample.metadata["tag"] = {
        "source": sample.source,
        "rollout_id": sample.rollout_id,
        "weight_version": sample.weight_version,
    }


def redact(pattern: str, replacement: str = "[redacted]") -> SampleHook:
    """A hook that replaces a regular expression in the response's text, which the reward and transcripts see.

    The tokens, which training sees, stay what the policy wrote.
    """
    compiled = re.compile(pattern)

    def redact_response(_args: Any, sample: Sample) -> None:
        sample.response = compiled.sub(replacement, sample.response)

    return redact_response


def length_penalty(free_tokens: int, per_token: float) -> SampleHook:
    """A hook that takes ``per_token`` off the reward for each response token beyond ``free_tokens``.

    The reward is not known yet when hooks run: the amount goes to ``Sample.reward_adjustment``, added later.
    """

    def penalise(_args: Any, sample: Sample) -> None:
        sample.reward_adjustment -= per_token * max(0, sample.response_length - free_tokens)

    return penalise


def log_every(n: int) -> SampleHook:
    """A hook that logs every n-th transcript, from the first, at level INFO."""
    seen = itertools.count()

    def log_transcript(_args: Any, sample: Sample, *, rollout_id: int | None = None) -> None:
        if next(seen) % n == 0:
            _log.info(
                "rollout %s, sample %s\n%s\n--- %s\n%s",
                rollout_id,
                sample.index,
                sample.prompt,
                sample.status,
                sample.response,
            )

    return log_transcript


# Keys and tokens that must not reach logs and reports.
redact_secrets = redact(r"\b(?:sk|ghp|gho|hf|xoxb)[-_][A-Za-z0-9_-]{16,}\b|\bAKIA[0-9A-Z]{16}\b")
penalise_length = length_penalty(free_tokens=256, per_token=0.001)
log_transcripts = log_every(100)
