"""Whole runs of the command for every family: the embedded engine serves it, and trainer and engine agree."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.model_cases import KINDS, save_tiny
from train.example import VOCABULARY, write_example
from train.exporting import Export, export_model
from train.main import main

STEPS = 3
# One family for each kind of decoder on every run of CI, the others at night.
OFTEN = ("qwen3", "qwen3_moe", "kimi_k2", "gemma4_text/experts")
EVERY_KIND = [pytest.param(kind, marks=pytest.mark.slow if kind in OFTEN else pytest.mark.nightly) for kind in KINDS]


def flags_of(root: Path, model: Path, **others: object) -> dict[str, object]:
    """A model with the built-in example's tokenizer, trained on its prompts."""
    example = write_example(root / "example", seed=0)
    for file in example.hf_checkpoint.glob("*tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    return {
        "accelerator": "cpu", "launcher": "inline", "num-rollout": STEPS, "hf-checkpoint": model,
        "prompt-data": example.prompt_data, "label-key": "label", "rm-type": "exact_match", "rollout-batch-size": 8,
        "n-samples-per-prompt": 4, "rollout-max-response-len": 6, "num-steps-per-rollout": 2, "entropy-coef": 0.1,
        "lr": 1e-3, "trainer-threads": 1, "rollout-threads": 1, "output-dir": root / "run", **others,
    }  # fmt: skip


def run(flags: dict[str, object]) -> list[dict[str, float]]:
    """The metrics of each step."""
    assert main([word for name, value in flags.items() for word in (f"--{name}", str(value))]) == 0
    return [json.loads(line) for line in (Path(str(flags["output-dir"])) / "metrics.jsonl").read_text().splitlines()]


def assert_trainer_and_engine_agree(rows: list[dict[str, float]]) -> None:
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) <= 1e-4
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) <= 1e-3
    assert all(row["train/grad_norm"] > 0 for row in rows), "the weights did not move, so nothing was compared"


@pytest.mark.parametrize("model_type", EVERY_KIND)
def test_three_steps_of_training_agree_with_the_rollout(tmp_path, model_type):
    save_tiny(tmp_path / "model", model_type, vocab_size=len(VOCABULARY))
    saving = {"save": tmp_path / "saved", "save-interval": STEPS}
    flags = flags_of(tmp_path, tmp_path / "model", **saving)
    rows = run(flags | {"save-hf": tmp_path / "out"})
    assert len(rows) == STEPS
    assert_trainer_and_engine_agree(rows)
    config, trained = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "out"))
    assert trained["model_type"] == config["model_type"]

    # The checkpoint holds the same model as --save-hf, and training goes on from it.
    assert main(["export", "--load", str(tmp_path / "saved"), "--to", str(tmp_path / "exported")]) == 0
    exported, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "out"))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    more = {"load": tmp_path / "saved", "num-rollout": STEPS + 1, "output-dir": tmp_path / "more"}
    last = run(flags | more)[-1]
    assert last["step"] == STEPS
    assert_trainer_and_engine_agree([last])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])  # the dense decoder and the general one
def test_a_checkpoint_in_fp8_blocks_trains(tmp_path, model_type):
    save_tiny(tmp_path / "wide", model_type, vocab_size=len(VOCABULARY))
    export_model(Export(tmp_path / "wide", tmp_path / "model", fp8_blocks=True))
    rows = run(flags_of(tmp_path, tmp_path / "model", **{"save-hf": tmp_path / "out"}))
    assert_trainer_and_engine_agree(rows)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.nightly
def test_two_ranks_that_share_the_experts_agree_with_the_rollout(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "2")
    save_tiny(tmp_path / "model", "deepseek_v3", vocab_size=len(VOCABULARY))
    flags = flags_of(tmp_path, tmp_path / "model", **{"expert-model-parallel-size": 2})
    assert_trainer_and_engine_agree(run(flags | {"launcher": "ray"}))
