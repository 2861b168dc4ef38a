"""Rows that a run leaves out are told, with their reasons, before any worker starts."""

from __future__ import annotations

import json
from pathlib import Path

from train.config.settings import build
from train.example import write_example
from train.prepare import preflight


def test_bad_rows_and_long_prompts_of_training_and_evaluation_become_facts_of_the_run(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "407>", "label": "7"})
    long = json.dumps({"prompt": "407>" * 20, "label": "7"})
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text("\n".join([good, *["nonsense"] * 3, '{"prompt": "1>"}', long]))
    held_out.write_text("\n".join([good, "[]"]))
    values = {
        "hf_checkpoint": str(write_example(tmp_path / "example", seed=0).hf_checkpoint),
        "prompt_data": (str(train),),
        "eval_prompt_data": ("test", str(held_out)),
        "rollout_max_response_len": 3,
        "rollout_max_prompt_len": 10,
        "rollout_threads": 1,
        "skip_bad_rows": True,
    }
    assert preflight(build(values)) == {
        "skipped": "train.jsonl: 4 of 6 rows skipped: 3 not JSON, 1 without a usable label; "
        "train.jsonl: 1 of the next 2 prompts have more than 10 tokens and are skipped; "
        "--eval-prompt-data test: held_out.jsonl: 1 of 2 rows skipped: 1 not JSON"
    }
    train.write_text(good)
    held_out.write_text(good)
    assert preflight(build(values)) == {}
