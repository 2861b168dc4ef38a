"""Settings of evaluation, recording and replay that contradict each other or the disk are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.config import EvalConfig
from samples.errors import InputError
from train.config.checks import validate
from train.config.settings import build


@pytest.fixture
def given(tmp_path: Path) -> dict[str, object]:
    """A model and prompts that exist."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    return {"hf_checkpoint": str(tmp_path), "prompt_data": (str(tmp_path / "prompts.jsonl"),)}


def problems(given: dict[str, object], **values: object) -> str:
    try:
        validate(build({**given, **values}))
    except InputError as error:
        return str(error)
    return ""


def test_sets_are_pairs_of_name_and_file() -> None:
    config = EvalConfig(eval_prompt_data=("easy", "a.jsonl", "hard", "b.jsonl@[0:9]"))
    assert config.datasets == [("easy", "a.jsonl"), ("hard", "b.jsonl@[0:9]")]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"eval_prompt_data": ("file.jsonl",)}, "expected pairs of NAME FILE, got 1 words"),
        ({"eval_prompt_data": ("a/b", "{file}")}, "the name becomes part of metric keys"),
        ({"eval_prompt_data": ("a", "{file}", "a", "{file}")}, "2 sets are named a"),
        ({"eval_prompt_data": ("a", "gone.jsonl")}, "--eval-prompt-data gone.jsonl: no such file"),
        ({"eval_prompt_data": ("a", "{file}@[x:]")}, "--eval-prompt-data"),
        ({"eval_interval": 5}, "--eval-interval needs prompts to evaluate on"),
        ({"eval_prompt_data": ("a", "{file}"), "n_samples_per_eval_prompt": 4}, "greedy responses"),
        ({"eval_prompt_data": ("a", "{file}"), "eval_top_k": 0}, "--eval-top-k 0"),
        (
            {"eval_prompt_data": ("a", "{file}"), "eval_max_response_len": 4, "rollout_min_response_len": 5},
            "--rollout-min-response-len 5 is more than --eval-max-response-len 4",
        ),
        (
            {"eval_prompt_data": ("a", "{file}"), "eval_max_response_len": 900, "engine_max_total_tokens": 600},
            "--engine-max-total-tokens 600 cannot hold one request of an evaluation",
        ),
        ({"debug_train_only": True}, "--debug-train-only needs rollouts"),
        ({"debug_train_only": True, "debug_rollout_only": True}, "leave nothing to do"),
        ({"load_debug_rollout_data": "gone"}, "--load-debug-rollout-data gone: no such directory"),
        ({"save_debug_rollout_data": "{file}"}, "is a file"),
        ({"debug_rollout_only": True, "save_hf": "out"}, "trains no model to write"),
        ({"debug_rollout_only": True, "load_debug_rollout_data": "{dir}"}, "is trained on"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, object], values: dict[str, object], said: str) -> None:
    file, directory = given["prompt_data"][0], given["hf_checkpoint"]  # type: ignore[index]

    def filled(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        return value.replace("{file}", file).replace("{dir}", str(directory)) if isinstance(value, str) else value

    assert said in problems(given, **{name: filled(value) for name, value in values.items()})


def test_a_replay_needs_neither_prompts_nor_evaluation_sets(given: dict[str, object], tmp_path: Path) -> None:
    values = {"prompt_data": (), "eval_prompt_data": ("a", "gone.jsonl"), "load_debug_rollout_data": str(tmp_path)}
    assert problems(given, **values) == ""


def test_the_example_is_evaluated_without_naming_prompts() -> None:
    validate(build({"eval_interval": 25}))
