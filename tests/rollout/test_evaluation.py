"""Evaluations answer every held-out prompt once, in order, and leave training's prompts and random numbers alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.backends.cpu import CpuAccelerator
from rollout.config import EvalConfig, RewardConfig, RolloutConfig
from rollout.evaluation import evaluation_metrics, load_evaluation_sets, pass_at_k
from rollout.worker import RolloutSettings, RolloutWorker
from samples.config import DataConfig
from samples.errors import InputError
from samples.sample import Sample, Status
from samples.tokenizer import load_tokenizer
from train.example import write_example


@st.composite
def _passes(draw: st.DrawFn) -> tuple[list[int], int]:
    passed = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
    return passed, draw(st.integers(1, len(passed)))


@given(_passes())
def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_that_hold_a_pass(case: tuple[list[int], int]) -> None:
    passed, k = case
    choices = list(itertools.combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def _group(*rewards: float | None) -> list[Sample]:
    return [Sample(reward=reward, response_length=2, status=Status.COMPLETED) for reward in rewards]


def test_pass_at_k_is_reported_for_powers_of_two_up_to_the_responses_of_a_prompt() -> None:
    metrics = evaluation_metrics("set", [_group(1, 0, 0, 0, 0, 0), _group(0, 0, 0, 0, 0, 0)])
    assert [key for key in metrics if "pass@" in key] == ["eval/set/pass@1", "eval/set/pass@2", "eval/set/pass@4"]
    assert metrics["eval/set"] == pytest.approx(1 / 12)
    assert metrics["eval/set/pass@1"] == pytest.approx(1 / 12)
    assert metrics["eval/set/pass@2"] == pytest.approx((1 - 10 / 15) / 2)


def test_rewards_in_between_need_a_threshold_to_pass() -> None:
    groups = [_group(0.2, 0.7), _group(0.4, 0.5)]
    assert not any("pass@" in key for key in evaluation_metrics("set", groups))
    assert evaluation_metrics("set", groups, pass_threshold=0.5)["eval/set/pass@1"] == 0.5
    assert evaluation_metrics("set", groups, pass_threshold=0.6)["eval/set/pass@2"] == 0.5


def test_a_prompt_whose_samples_a_hook_removed_counts_nowhere() -> None:
    metrics = evaluation_metrics("set", [[], _group(1.0), _group(None)])
    assert metrics["eval/set"] == 1.0
    assert metrics["eval/set/pass@1"] == 1.0
    assert evaluation_metrics("set", [[]]) == {}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RolloutSettings:
    files = write_example(tmp_path_factory.mktemp("example"), seed=3)
    return RolloutSettings(
        rollout=RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=4, rollout_max_response_len=3),
        reward=RewardConfig(),
        evaluation=EvalConfig(
            eval_prompt_data=("first", f"{files.eval_prompt_data}@[0:6]", "second", f"{files.eval_prompt_data}@[0:6]"),
            n_samples_per_eval_prompt=4,
            eval_temperature=1.0,
            eval_max_response_len=5,
        ),
        data=DataConfig(prompt_data=(str(files.prompt_data),)),
        model_dir=files.hf_checkpoint,
        seed=3,
        threads=1,
    )


def _worker(settings: RolloutSettings) -> RolloutWorker:
    worker = RolloutWorker(settings, CpuAccelerator(), load_weights=True)
    worker.start()
    return worker


@pytest.fixture
def worker(settings: RolloutSettings) -> Iterator[RolloutWorker]:
    worker = _worker(settings)
    yield worker
    worker.close()


def test_an_evaluation_depends_on_the_weights_and_not_on_when_it_is_made(worker: RolloutWorker) -> None:
    first = worker.evaluate(0)
    worker.collect(0)
    assert worker.evaluate(7) == first
    assert first["eval/first/num_samples"] == 24
    assert first["eval/first/num_prompts"] == 6
    assert first["eval/first/pass@4"] >= first["eval/first/pass@1"] == pytest.approx(first["eval/first"])


def test_sets_draw_random_numbers_of_their_own(worker: RolloutWorker) -> None:
    """Same prompts, same sample numbers: only the stream tells them apart."""
    metrics = worker.evaluate(0)
    lengths = [metrics[f"eval/{name}/response_len/mean"] for name in ("first", "second")]
    assert lengths[0] != lengths[1]


def test_rollouts_are_the_same_with_and_without_evaluations(settings: RolloutSettings) -> None:
    def rollouts(evaluate: bool) -> list[Sample]:
        worker = _worker(settings)
        collected = []
        for rollout_id in range(3):
            if evaluate:
                worker.evaluate(rollout_id)
            collected += [sample for group in worker.collect(rollout_id).groups for sample in group]
        worker.close()
        return collected

    assert rollouts(True) == rollouts(False)


def test_greedy_evaluations_take_the_likeliest_token(settings: RolloutSettings, tmp_path: Path) -> None:
    """The labels are what transformers answers greedily, so every response is right."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(settings.model_dir)
    path = tmp_path / "greedy.jsonl"
    with path.open("w") as file:
        for prompt in ("123>", "907>", "55>"):
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
            answer = model.generate(**ids, max_new_tokens=3, do_sample=False)[0, ids["input_ids"].shape[1] :]
            file.write(
                json.dumps({"prompt": prompt, "label": tokenizer.decode(answer, skip_special_tokens=True)}) + "\n"
            )
    worker = _worker(dataclasses.replace(settings, evaluation=EvalConfig(eval_prompt_data=("greedy", str(path)))))
    metrics = worker.evaluate(0)
    worker.close()
    assert metrics["eval/greedy"] == 1.0
    assert metrics["eval/greedy/num_samples"] == 3


def test_hooks_are_told_that_a_sample_is_an_evaluations(settings: RolloutSettings, tmp_path: Path) -> None:
    (tmp_path / "eval_hook_for_test.py").write_text(
        "def mark(args, sample, evaluation, rollout_id):\n"
        "    sample.reward_adjustment = 10.0 * evaluation + rollout_id\n"
        "    assert sample.rollout_id == rollout_id\n"
    )
    hooked = dataclasses.replace(
        settings,
        rollout=settings.rollout.model_copy(update={"rollout_sample_hook_path": ("eval_hook_for_test.mark",)}),
        reward=RewardConfig(user_code_dir=str(tmp_path)),
    )
    worker = _worker(hooked)
    assert 15 <= worker.evaluate(5)["eval/first"] <= 16
    assert all(0 <= sample.reward_value() <= 1 for group in worker.collect(0).groups for sample in group)
    worker.close()


def test_a_prompt_too_long_is_left_out_and_counted(settings: RolloutSettings, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "1>", "label": "1"}\n{"prompt": "123456789>", "label": "9"}\n')
    config = EvalConfig(eval_prompt_data=("mixed", str(path)), eval_max_prompt_len=4)
    worker = _worker(dataclasses.replace(settings, evaluation=config))
    metrics = worker.evaluate(0)
    worker.close()
    assert metrics["eval/mixed/num_prompts"] == 1
    assert metrics["eval/mixed/skipped_prompts"] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [("{}\n", "line 1"), ("", "the file is empty"), ('{"prompt": "123456>", "label": "6"}\n', "--eval-max-prompt-len")],
)
def test_a_bad_file_is_named_with_the_flag_of_evaluations(
    settings: RolloutSettings, tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    config = EvalConfig(eval_prompt_data=("bad", str(path)))
    with pytest.raises(InputError, match=says) as refused:
        load_evaluation_sets(config, settings.data, load_tokenizer(settings.model_dir), max_prompt_len=4)
    assert "bad.jsonl" in str(refused.value)
    assert "--prompt-data" not in str(refused.value).replace("--eval-prompt-data", "")


@pytest.mark.parametrize(("key", "label"), [("inherit", "training"), ("own", "evaluation"), (None, None)])
def test_the_label_of_evaluations_is_trainings_their_own_or_none(
    settings: RolloutSettings, tmp_path: Path, key: str | None, label: str | None
) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "1", "label": "training", "own": "evaluation"}\n')
    config = EvalConfig(eval_prompt_data=("held_out", str(path)), eval_label_key=key)
    (one,) = load_evaluation_sets(config, settings.data, load_tokenizer(settings.model_dir), max_prompt_len=8)
    assert one.source.every_group()[0][0].label == label


def test_closing_stops_engine_and_loop_when_the_reward_cannot_be_closed(
    settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    worker = _worker(settings)
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert {"rollout-loop", "rollout-decode"} <= started

    async def fails() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(worker._reward, "close", fails)
    with pytest.raises(RuntimeError, match="no"):
        worker.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("rollout-")]


def test_a_response_that_fanned_out_counts_once_by_its_mean():
    def sample(reward):
        return Sample(reward=reward, response_length=2, status=Status.COMPLETED)

    groups: Any = [[[sample(1.0), sample(1.0)], sample(0.0)], [[sample(0.0)], sample(0.0)]]
    metrics = evaluation_metrics("some", groups)
    assert (metrics["eval/some"], metrics["eval/some/num_samples"]) == (0.25, 5)
    assert metrics["eval/some/pass@2"] == 0.5
