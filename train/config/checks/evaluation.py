"""Evaluation: names and files of its sets, and how their prompts are answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from train.config.checks.paths import prompt_file_problems
from train.config.run import RunConfig

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # it becomes part of metric keys


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    replays = config.debug.replays  # without an engine there is no evaluation, and its files may be gone
    yield from _set_problems(evaluation.eval_prompt_data, look_at_files=not replays)
    if replays:
        return
    example = config.model.hf_checkpoint is None and not config.data.prompt_data  # it brings its own
    if not evaluation.eval_prompt_data and not example:
        for option, given in (
            ("--eval-interval", evaluation.eval_interval is not None),
            ("--n-samples-per-eval-prompt", evaluation.n_samples_per_eval_prompt > 1),
        ):
            if given:
                yield f"{option} needs prompts to evaluate on: give --eval-prompt-data NAME FILE"
    if evaluation.n_samples_per_eval_prompt > 1 and evaluation.eval_temperature == 0:
        yield (
            f"--n-samples-per-eval-prompt {evaluation.n_samples_per_eval_prompt} with --eval-temperature 0: greedy "
            "responses to one prompt are all alike; give --eval-temperature above 0, 1.0 is usual"
        )
    if evaluation.eval_top_k == 0:
        yield "--eval-top-k 0: leaves no token to choose from; use -1 for all, or at least 1"
    yield from _length_problems(config)
    compares = config.reward.custom_rm_path is None and config.reward.rm_type in ("exact_match", "math")
    if evaluation.eval_prompt_data and evaluation.eval_label_key is None and compares:
        yield f"--eval-label-key none: --rm-type {config.reward.rm_type} compares with a label; name its field"


def _set_problems(given: tuple[str, ...], *, look_at_files: bool) -> Iterator[str]:
    if len(given) % 2:
        yield (
            f"--eval-prompt-data {' '.join(given)}: expected pairs of NAME FILE, got {len(given)} words; for example "
            "--eval-prompt-data held_out test.jsonl"
        )
        return
    names = given[::2]
    for name, file in zip(names, given[1::2], strict=True):
        if not _NAME.fullmatch(name):
            yield (
                f"--eval-prompt-data {name} {file}: the name becomes part of metric keys; use up to 64 letters, digits "
                "and _ . -"
            )
        if look_at_files:
            yield from prompt_file_problems("--eval-prompt-data", file)
    for name, count in Counter(names).items():
        if count > 1:
            yield f"--eval-prompt-data: {count} sets are named {name}; give each a name of its own"


def _length_problems(config: RunConfig) -> Iterator[str]:
    rollout, most = config.rollout, config.evaluation.eval_max_response_len
    if most is None:
        return
    least = rollout.rollout_min_response_len
    if least > most:
        yield f"--rollout-min-response-len {least} is more than --eval-max-response-len {most}"
    longest, cache = most + (config.evaluation.eval_max_prompt_len or 1), rollout.engine_max_total_tokens
    if cache is not None and cache < longest:
        yield (
            f"--engine-max-total-tokens {cache} cannot hold one request of an evaluation, which can have {longest} "
            f"tokens (--eval-max-response-len {most} and a prompt); use at least {longest}"
        )
