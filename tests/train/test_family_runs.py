"""Whole runs of the command for every family: the embedded engine serves it, and trainer and engine agree."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.train.model_cases import KINDS, save_tiny
from train.example import VOCABULARY, write_example
from train.main import main

STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_three_steps_of_training_agree_with_the_rollout(tmp_path, model_type):
    example = write_example(tmp_path / "example", seed=0)
    save_tiny(tmp_path / "model", model_type, vocab_size=len(VOCABULARY))
    for file in example.hf_checkpoint.glob("*tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    flags = {
        "accelerator": "cpu", "launcher": "inline", "num-rollout": STEPS, "hf-checkpoint": tmp_path / "model",
        "prompt-data": example.prompt_data, "label-key": "label", "rm-type": "exact_match", "rollout-batch-size": 8,
        "n-samples-per-prompt": 4, "rollout-max-response-len": 6, "num-steps-per-rollout": 2, "entropy-coef": 0.1,
        "lr": 1e-3, "trainer-threads": 1, "rollout-threads": 1, "output-dir": tmp_path / "run",
        "save-hf": tmp_path / "out",
    }  # fmt: skip
    flags |= {"save": tmp_path / "saved", "save-interval": STEPS}
    assert main([word for name, value in flags.items() for word in (f"--{name}", str(value))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) <= 1e-4
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) <= 1e-3
    assert all(row["train/grad_norm"] > 0 for row in rows), "the weights did not move, so nothing was compared"

    # The checkpoint holds the same model as --save-hf, and training goes on from it.
    assert main(["export", "--load", str(tmp_path / "saved"), "--to", str(tmp_path / "exported")]) == 0
    exported, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "out"))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    more = flags | {"load": tmp_path / "saved", "num-rollout": STEPS + 1, "output-dir": tmp_path / "more"}
    del more["save-hf"]
    assert main([word for name, value in more.items() for word in (f"--{name}", str(value))]) == 0
    last = json.loads((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS
    assert last["train/train_rollout_logprob_abs_diff"] <= 1e-4
