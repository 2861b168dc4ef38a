import asyncio
import logging

from hooks import apply_rollout_sample_hooks
from hooks.builtin import length_penalty, log_every, redact
from rollout.config import RolloutConfig
from samples import Sample


def apply(name: str, sample: Sample, **context) -> Sample:
    config = RolloutConfig(rollout_sample_hook_path=(f"hooks.builtin.{name}",))
    return asyncio.run(apply_rollout_sample_hooks(config, sample, **context))


def test_the_source_is_noted_with_policy_and_rollout():
    sample = apply("tag_with_source", Sample(source="gsm", rollout_id=3, weight_version=2))
    assert sample.metadata["tag"] == {"source": "gsm", "rollout_id": 3, "weight_version": 2}


def test_secrets_are_redacted_in_the_text_and_not_in_the_tokens():
    response = "use ghp_" + "a" * 20 + " and AKIA" + "B" * 16 + ", not sk-short"
    sample = apply("redact_secrets", Sample(response=response, tokens=[1, 2], response_length=2))
    assert sample.response == "use [redacted] and [redacted], not sk-short"
    assert sample.response_tokens == [1, 2]


def test_any_pattern_can_be_redacted():
    sample = Sample(response="Ada and ada")
    assert redact(r"\bAda\b", "X")(None, sample) is None
    assert sample.response == "X and ada"


def test_tokens_beyond_the_free_ones_cost_reward():
    sample = apply("penalise_length", Sample(response_length=356))
    assert sample.reward_adjustment == -0.1
    penalise = length_penalty(free_tokens=10, per_token=0.5)
    short = Sample(response_length=10)
    penalise(None, short)
    assert short.reward_adjustment == 0.0


def test_every_nth_transcript_is_logged(caplog):
    log = log_every(3)
    with caplog.at_level(logging.INFO, logger="hooks.builtin"):
        for index in range(7):
            log(None, Sample(index=index, response=f"answer {index}"), rollout_id=5)
    assert [f"answer {index}" in caplog.text for index in range(7)] == [True, False, False, True, False, False, True]
    assert "rollout 5" in caplog.text
