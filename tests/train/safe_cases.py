"""Runs as a user starts them after login, for the tests of safe defaults."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.train.model_cases import save_tiny
from train.example import EOS, PAD, VOCABULARY, write_example

ACCELRL = Path(sys.executable).with_name("accelrl")
REPOSITORY = Path(__file__).parents[2]


def write_model(directory: Path) -> Path:
    """A Qwen3 that two tensor-parallel ranks can share, with the built-in example's tokenizer; prompts beside it."""
    files = write_example(directory / "example", seed=0)
    save_tiny(directory, "qwen3", vocab_size=len(VOCABULARY), eos_token_id=EOS, pad_token_id=PAD)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files.hf_checkpoint / name, directory)
    shutil.copy(files.prompt_data, directory)
    return directory


def model_flags(directory: Path) -> tuple[str, ...]:
    prompts = ("--prompt-data", str(directory / "prompts.jsonl"))
    return ("--hf-checkpoint", str(directory), *prompts, "--rollout-max-response-len", "3")


def train_command(output_dir: Path, *flags: str, steps: int = 3) -> list[str]:
    return [
        *(str(ACCELRL), "train", "--accelerator", "cpu", "--output-dir", str(output_dir), "--seed", "3"),
        *("--num-rollout", str(steps), "--rollout-batch-size", "8", "--global-batch-size", "64", *flags),
    ]


def login_environment(**values: str) -> dict[str, str]:
    """A user's environment after login: nothing that this test process, or a library in it, has set for itself."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"ACCELRL_CPU_DEVICES": "2"} | values
