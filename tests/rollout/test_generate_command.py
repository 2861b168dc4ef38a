"""``accelrl rollout generate``: answers and scores prompts with a model directory, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.main import main
from train.example import write_example


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_example(tmp_path_factory.mktemp("example"), seed=0)


def command(example: Any, *more: str) -> list[str]:
    flags = ["--hf-checkpoint", str(example.hf_checkpoint), "--prompt-data", str(example.prompt_data)]
    return ["generate", *flags, "--num-prompts", "3", "--rollout-max-response-len", "2", "--accelerator", "cpu", *more]


def test_samples_are_written_with_their_rewards(example: Any, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "samples.jsonl"
    flags = ("--rollout-temperature", "1", "--rollout-top-p", "0.5", "--rollout-top-k", "4", "--metadata-key", "none")
    assert main(command(example, *flags, "--output", str(output))) == 0
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(samples) == 3
    assert all(1 <= len(ids) <= 4 for sample in samples for ids in sample["rollout_kept_token_ids"])
    assert "3 prompts, 3 responses, mean reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--output", "{tmp}/absent/samples.jsonl"), "--output {tmp}/absent/samples.jsonl: cannot be written: No such"),
        (("--output", "{tmp}"), "--output {tmp}: cannot be written: Is a directory"),
        (("--rollout-top-p", "0"), "--rollout-top-p 0.0: must be above 0"),
        (("--rollout-top-k", "0"), "--rollout-top-k 0: must be -1"),
        (("--rm-type", "remote_rm"), "--rm-url"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_model_is_loaded(
    example: Any, tmp_path: Path, capsys: Any, flags: tuple[str, ...], message: str
) -> None:
    assert main(command(example, *(flag.format(tmp=tmp_path) for flag in flags))) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
