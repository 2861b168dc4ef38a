"""What a person got wrong ends with one message that names it, and status 2, before any worker starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train.example import write_example
from train.main import main

GOOD = {"prompt": "407>", "label": "7"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("example"), seed=0).hf_checkpoint


@pytest.fixture
def refuse(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs ``accelrl train`` on a prompt file with flags that are otherwise right; returns the one error message."""

    def run(content: bytes | None = None, *flags: str) -> str:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_bytes(_lines(GOOD) if content is None else content)
        argv = ["--accelerator", "cpu", "--launcher", "inline", "--output-dir", str(tmp_path / "run")]
        argv += ["--hf-checkpoint", str(model_dir), "--prompt-data", str(prompts), "--rollout-max-response-len", "3"]
        argv += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", *flags]
        status = main(argv)
        captured = capsys.readouterr()
        assert status == 2
        assert "Traceback" not in captured.err
        assert captured.err.startswith("accelrl: error: ")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return captured.err

    return run


def _lines(*rows: object) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def test_a_missing_prompt_file_is_named(refuse) -> None:
    assert "gone.jsonl" in refuse(None, "--prompt-data", "gone.jsonl")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"prompt": "1>", "label"\n', "line 2"),
        (b"[1, 2]\n", "line 2"),
        (b'{"prompt": "123>"}\n', "label"),
        (b'{"prompt": "", "label": "1"}\n', "empty"),
        (b'{"prompt": "1\xff>", "label": "1"}\n', "UTF-8"),
    ],
    ids=["broken line", "not an object", "missing label", "empty prompt", "invalid UTF-8"],
)
def test_a_bad_row_is_named_by_file_line_and_what_is_wrong(refuse, bad: bytes, says: str) -> None:
    message = refuse(_lines(GOOD, bad, GOOD))
    assert "prompts.jsonl" in message
    assert "line 2" in message
    assert says in message


def test_a_file_without_a_usable_row_is_refused(refuse) -> None:
    assert "prompts.jsonl" in refuse(b"\n\n")
    assert "prompts.jsonl" in refuse(b"nonsense\n", "--skip-bad-rows")


def test_prompts_that_are_all_too_long_are_refused_with_the_limit(refuse) -> None:
    message = refuse(None, "--rollout-max-prompt-len", "2")
    assert "--rollout-max-prompt-len" in message
    assert "2" in message


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--n-samples-per-prompt", "0"), "--n-samples-per-prompt"),
        (("--rollout-temperature", "0"), "--rollout-temperature"),
        (("--rollout-temperature", "-1"), "--rollout-temperature"),
        (("--rollout-temperature", "nan"), "--rollout-temperature"),
        (("--global-batch-size", "3"), "--global-batch-size"),
        (("--rollout-batchsize", "3"), "--rollout-batch-size"),
        (("--actor-num-gpus-per-node", "2"), "ray"),
        (("--custom-rm-path", "nowhere.to_be_found"), "--custom-rm-path"),
        (("--dynamic-sampling-filter-path", "filters.nonesuch"), "--dynamic-sampling-filter-path"),
        (("--rollout-sample-hook-path", "hooks.nonesuch"), "--rollout-sample-hook-path"),
        (("--rollout-max-response-len", "500"), "--rollout-max-response-len"),
    ],
)
def test_a_setting_that_cannot_work_is_named(refuse, flags: tuple[str, ...], says: str) -> None:
    assert says in refuse(None, *flags)


def test_a_run_is_never_written_over(refuse, tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    assert "--output-dir" in refuse(None, "--output-dir", str(tmp_path / "old"))


def test_an_accelerator_that_is_not_there_is_refused_with_its_reason(tmp_path: Path) -> None:
    for name, says in (("musa", "torch_musa"), ("nonesuch", "nonesuch")):
        done = _command("--accelerator", name, "--output-dir", str(tmp_path / name))
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert says in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no judge today')", "no judge today"),
        ("return None", "None"),
        ("return float('nan')", "nan"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run_with_its_name(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "judge.py").write_text(f"def score(args, sample):\n    {body}\n")
    done = _command(
        "--accelerator", "cpu", "--launcher", "inline", "--output-dir", str(tmp_path / "run"),
        "--custom-rm-path", "judge.score", "--user-code-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "judge.score" in done.stderr
    assert says in done.stderr


def _command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "train", *argv], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", b"cut", "model.safetensors (3 bytes) is not a whole safetensors file"),
        ("generation_config.json", b"{", "generation_config.json cannot be used"),
    ],
)
def test_a_broken_model_is_found_before_a_worker_starts(
    refuse, model_dir: Path, tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    broken = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    (broken / file).write_bytes(content)
    assert says in refuse(None, "--hf-checkpoint", str(broken))
    assert "vocab_size" in refuse(None, "--rollout-stop-token-ids", "1000")
