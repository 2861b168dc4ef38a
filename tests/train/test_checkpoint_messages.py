"""What cannot be resumed, or saved to, is refused in one clear message before any worker starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.checkpoint.directory import CheckpointDirectory
from train.checkpoint.manifest import MANIFEST
from train.example import write_example
from train.main import main
from train.run_directory import SaveDirectory

SMALL = ["--accelerator", "cpu", "--launcher", "inline", "--progress", "plain", "--no-report"]
SMALL += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"]
SMALL += ["--rollout-max-response-len", "3"]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps that saved both. Tests that damage something copy it."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    assert (
        main([*SMALL, "--num-rollout", "2", "--save-interval", "1", "--lr", "1e-3", "--output-dir", str(directory)])
        == 0
    )
    return directory


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    shutil.copytree(run_dir, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step_000001"


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Start a run and return the one line that it prints instead of starting."""

    def start(*flags: Any, output_dir: Path | None = None, steps: int = 3) -> str:
        capsys.readouterr()
        flags = ("--num-rollout", steps, "--output-dir", output_dir or tmp_path / "new", *flags)
        status = main([*SMALL, *map(str, flags)])
        printed = capsys.readouterr()
        assert status == 2
        assert "starting" not in printed.out
        lines = printed.err.splitlines()
        assert len(lines) == 1
        return lines[0].removeprefix("accelrl: error: ")

    return start


def edit_manifest(checkpoint: Path, **values: object) -> None:
    document = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(document | values))


def test_a_directory_that_is_none(refused: Refused, tmp_path: Path):
    assert "there is no such directory" in refused("--load", tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("--load", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint and holds none" in refused("--load", tmp_path / "empty")
    (tmp_path / "cut" / ".tmp-step_000004").mkdir(parents=True)
    assert "was cut short" in refused("--load", tmp_path / "cut")


@pytest.mark.parametrize(
    "files",
    [
        [".metadata", "__0_0.distcp", "common.pt", "metadata.json"],
        ["latest_checkpointed_iteration.txt", "iter_0000012/__0_0.distcp"],
        ["mp_rank_00/model_optim_rng.pt"],
    ],
)
def test_a_checkpoint_of_megatrons(refused: Refused, tmp_path: Path, files: list[str]):
    for file in files:
        path = tmp_path / "megatron" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    message = refused("--load", tmp_path / "megatron")
    assert "Megatron" in message
    assert "--hf-checkpoint" in message


def test_a_model_directory_and_a_pickle(refused: Refused, run_dir: Path, tmp_path: Path):
    model = run_dir / "example" / "model"
    assert f"give --hf-checkpoint {model}" in refused("--load", model)
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "optimizer.pt").write_text("")
    assert "optimizer.pt, a pickle" in refused("--load", tmp_path / "pickles")


def test_a_checkpoint_of_another_model(refused: Refused, copy: Path, tmp_path: Path):
    files = write_example(tmp_path / "other", seed=1)
    prompts = ("--prompt-data", files.prompt_data, "--hf-checkpoint", files.hf_checkpoint)
    message = refused("--load", copy, *prompts)
    assert "of another model than --hf-checkpoint" in message
    assert "other weights" in message
    config = json.loads((files.hf_checkpoint / "config.json").read_text())
    (files.hf_checkpoint / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert "rms_norm_eps is 1e-06 there and 1e-05 here" in refused("--load", copy, *prompts)


def test_a_damaged_file(refused: Refused, copy: Path):
    path = copy / "exp_avg.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    message = refused("--load", copy)
    assert f"exp_avg.safetensors has {len(content) - 100} bytes, {len(content)} were saved" in message
    assert f"--load {copy.with_name('step_000000')}" in message
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "its checksum differs" in refused("--load", copy.parent)
    path.unlink()
    assert "exp_avg.safetensors is missing" in refused("--load", copy.parent.parent)


def test_a_damaged_manifest(refused: Refused, copy: Path):
    edit_manifest(copy, version=2)
    assert "format version 2" in refused("--load", copy)
    edit_manifest(copy, version=1, step="last")
    assert "step" in refused("--load", copy)
    (copy / MANIFEST).write_text('{"format": ')
    assert "manifest.json cannot be read" in refused("--load", copy)


def test_nothing_left_to_do(refused: Refused, run_dir: Path):
    message = refused("--load", run_dir, steps=2)
    assert "nothing is left to do" in message
    assert "the run has 2" in message


def test_another_seed_or_other_prompts(refused: Refused, copy: Path, tmp_path: Path):
    assert "--seed 5" in refused("--load", copy, "--seed", "5")
    example = copy.parent.parent / "example"
    lines = (example / "prompts.jsonl").read_text().splitlines(keepends=True)
    (example / "prompts.jsonl").write_text("".join(lines[1:]))
    given = ("--prompt-data", example / "prompts.jsonl", "--hf-checkpoint", example / "model", "--source-key", "source")
    message = refused("--load", copy, *given)
    assert message.startswith("--prompt-data")
    assert len(message) < 800


def test_directories_of_other_runs(refused: Refused, copy: Path, run_dir: Path, tmp_path: Path):
    saved, ours = copy.parent, copy.parent.parent
    assert "--load auto to go on with that run" in refused("--save", saved)
    assert "its newest checkpoint is step_000001" in refused("--load", saved / "step_000000", "--save", saved)
    assert "already holds a run" in refused("--load", "none", output_dir=ours)
    edit_manifest(copy, run_id="another")
    assert "holds another run" in refused("--load", copy, output_dir=ours)


def test_flags_that_do_not_go_together(refused: Refused, tmp_path: Path):
    assert "--save-keep 2: nothing is saved" in refused("--save-keep", 2)
    assert "give --save DIR too" in refused("--load", "auto")
    assert "--debug-rollout-only" in refused("--save", tmp_path / "saved", "--debug-rollout-only")


def test_changed_settings_are_named(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--num-rollout", "3", "--lr", "5e-4", "--n-samples-per-prompt", "2", "--load", str(copy)]
    assert main([*SMALL, *flags, "--output-dir", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "--lr 0.0005 (was 0.001)" in printed
    assert "--n-samples-per-prompt 2 (was 4)" in printed
    assert "--lr-decay-iters 2 keeps it as it was" in printed


def test_an_interrupted_save_is_cleaned_up_by_the_next(copy: Path, tmp_path: Path):
    run = copy.parent.parent
    (copy.parent / ".tmp-step_000009").mkdir()
    (copy.parent / ".tmp-step_000009" / "model.part-0").write_text("half")
    flags = ["--num-rollout", "3", "--load", "auto", "--save-interval", "1", "--save-keep", "2"]
    assert main([*SMALL, *flags, "--output-dir", str(run)]) == 0
    assert sorted(path.name for path in copy.parent.iterdir()) == ["step_000001", "step_000002"]
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2]


def test_a_run_that_saves_into_another_runs_directory_is_refused_while_that_runs(refused: Refused, tmp_path: Path):
    held = SaveDirectory(tmp_path / "saved")
    assert refused("--save", tmp_path / "saved").startswith(f"--save {tmp_path / 'saved'} is in use by another run")
    held.release()
    assert not (tmp_path / "saved").exists()


def test_what_merely_looks_like_a_leftover_stays(tmp_path: Path):
    directory = CheckpointDirectory(tmp_path)
    (tmp_path / ".tmp-notes").mkdir()
    (tmp_path / ".tmp-step_000001").symlink_to(".tmp-notes")
    (tmp_path / ".tmp-removed-step_000000").mkdir()
    directory.begin(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-notes", ".tmp-step_000001", ".tmp-step_000002"]


def test_the_same_command_goes_on_and_replaces_the_model_that_the_stopped_run_wrote(
    refused: Refused, copy: Path, tmp_path: Path
):
    command = [*SMALL, "--lr", "1e-3", "--output-dir", str(tmp_path / "again"), "--save-hf", str(tmp_path / "hf")]
    command += ["--load", "auto", "--save-interval", "1"]
    assert main([*command, "--num-rollout", "1"]) == 0
    before = (tmp_path / "hf" / "model.safetensors").stat().st_mtime_ns
    assert main([*command, "--num-rollout", "2"]) == 0
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mtime_ns != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "run"]
    other = ("--save-hf", tmp_path / "hf", "--load", copy, "--lr", "1e-3")
    assert "not an empty directory" in refused(*other), "another run's model is not replaced"
    (tmp_path / "hf" / "notes.txt").touch()
    again = [*command[len(SMALL) :], "--num-rollout", 3]
    assert "not an empty directory" in refused(*again, output_dir=tmp_path / "again")


DAMAGED: dict[str, tuple[tuple[str, ...], object]] = {
    "no settings": (("config",), {}),
    "a section that is none": (("config", "optimizer"), "x"),
    "a file elsewhere": (("state", "trainer", "files"), {"../../etc/passwd": {"bytes": 1, "crc32": 1}}),
    "an absolute file": (("state", "trainer", "files"), {"/dev/zero": {"bytes": 0, "crc32": 0}}),
    "no files": (("state", "trainer", "files"), {}),
    "steps below zero": (("state", "trainer", "optimizer_steps"), -5),
    "steps beyond all": (("state", "trainer", "optimizer_steps"), 10**300),
    "a version below zero": (("state", "weight_version"), -1),
    "a place beyond the prompts": (("state", "rollout", "source", "position"), 10**9),
    "a place that is text": (("state", "rollout", "source", "position"), "x"),
    "an epoch below zero": (("state", "rollout", "source", "epoch"), -1),
    "groups that are none": (("state", "rollout", "source", "waiting"), [{"a": 1}]),
    "no prompts": (("state", "rollout", "source", "fingerprint"), {}),
    "no generators": (("state", "rollout", "generators"), {}),
    "a generator that is none": (("state", "rollout", "generators", "torch"), "AAAA"),
}


@pytest.mark.parametrize(("place", "value"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_manifest_from_someone_else(refused: Refused, copy: Path, place: tuple[str, ...], value: object):
    document = json.loads((copy / MANIFEST).read_text())
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (copy / MANIFEST).write_text(json.dumps(document))
    refused("--load", copy)


def test_a_manifest_of_endless_brackets(refused: Refused, copy: Path):
    (copy / MANIFEST).write_text("[" * 100_000)
    assert "cannot be read" in refused("--load", copy)
