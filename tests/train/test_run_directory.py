"""A run's directory: one run at a time, nothing left of one that did not start, a config.toml to start it again."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samples.errors import InputError
from train.main import main
from train.run_directory import LOCK_FILE, RunDirectory

SMALL = ["--accelerator", "cpu", "--launcher", "inline", "--progress", "off", "--no-report", "--no-use-tensorboard"]
SMALL += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"]
SMALL += ["--rollout-max-response-len", "3", "--num-rollout", "1", "--eval-interval", "none", "--save-interval", "1"]
Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Start a run in an empty directory; the one line that it prints instead of starting."""
    monkeypatch.chdir(tmp_path)

    def start(*flags: Any) -> str:
        capfd.readouterr()
        assert main([*SMALL, *map(str, flags)]) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0].removeprefix("accelrl: error: ")

    return start


# Who holds it


def test_two_runs_do_not_share_a_directory(tmp_path: Path, refused: Refused) -> None:
    held = RunDirectory(tmp_path / "run")
    message = refused("--output-dir", tmp_path / "run")
    assert message.startswith(f"--output-dir {tmp_path / 'run'} is in use by another run (process {os.getpid()})")
    held.release()
    again = RunDirectory(tmp_path / "run")
    again.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    code = "import os, pathlib, train.run_directory as d; "
    code += f"held = d.RunDirectory(pathlib.Path({str(tmp_path)!r})); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert (tmp_path / LOCK_FILE).exists()
    RunDirectory(tmp_path).release()


def test_a_child_process_does_not_keep_the_directory(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    held.release()
    RunDirectory(tmp_path).release()
    child.communicate(b"\n")


def test_a_lock_taken_on_a_file_that_was_just_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before this one ends between our opening the file and our lock."""
    before, flock = RunDirectory(tmp_path), fcntl.flock

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        before.release()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    held = RunDirectory(tmp_path)
    with pytest.raises(InputError, match="in use by another run"):
        RunDirectory(tmp_path)
    held.release()


def test_new_directories_of_the_same_name_are_different_ones(tmp_path: Path) -> None:
    directories = [RunDirectory.new(tmp_path / "runs", "same") for _ in range(3)]
    assert [directory.path.name for directory in directories] == ["same", "same-2", "same-3"]
    for directory in reversed(directories):
        directory.discard()
    assert list(tmp_path.iterdir()) == []


def test_discarding_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "example").mkdir()
    (tmp_path / "mine").write_text("keep")
    RunDirectory(tmp_path).discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["example", "mine"]


# Runs that do not start


@pytest.mark.parametrize(
    "flags", [("--dynamic-sampling-filter-path", "filters.no_such"), ("--save-hf", "/proc/x")], ids=["filter", "export"]
)
@pytest.mark.parametrize("directory", [(), ("--output-dir", "deep/run")], ids=["default", "given"])
def test_a_refused_run_leaves_no_directory(
    refused: Refused, tmp_path: Path, flags: tuple[str, str], directory: tuple[str, ...]
) -> None:
    assert refused(*flags, *directory).startswith(flags[0])
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_does_not_stand_in_the_way_of_the_next(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.inline import InlineRuntime

    def fails(self: InlineRuntime) -> None:
        raise InputError("--lr: the start failed")

    with monkeypatch.context() as patch:
        patch.setattr(InlineRuntime, "start", fails)
        assert refused("--output-dir", "run") == "--lr: the start failed"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "run" / "metrics.jsonl").touch()  # as a run leaves it that is killed before its first step ends
    assert main([*SMALL, "--output-dir", "run"]) == 0
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    assert "already holds a run" in refused("--output-dir", "run")


# --save-hf


def test_an_export_that_cannot_be_written_is_refused_before_training(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert refused("--save-hf", "link").startswith(f"--save-hf {tmp_path / 'link'}: is a link to nowhere")
    assert refused("--save-hf", "/proc/x").startswith("--save-hf /proc/x: cannot be written")
    assert "cannot be written" in refused("--save-hf", "n" * 300)
    assert refused("--output-dir", "run", "--save-hf", "run").startswith("--save-hf run is --output-dir")
    assert "own directory" in refused("--output-dir", "out/run", "--save-hf", "out")
    assert "own directory" in refused("--save-hf", "runs")
    assert "among the checkpoints" in refused("--output-dir", "run", "--save-hf", "run/checkpoints/hf")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_an_export_into_the_model_is_refused(refused: Refused, tmp_path: Path) -> None:
    from train.example import write_example

    files = write_example(tmp_path / "example", seed=0)
    flags = ("--hf-checkpoint", files.hf_checkpoint, "--prompt-data", files.prompt_data, "--label-key", "label")
    flags += ("--rm-type", "exact_match", "--save-hf")
    assert "would write over --hf-checkpoint" in refused(*flags, files.hf_checkpoint)
    assert "would write into --hf-checkpoint" in refused(*flags, files.hf_checkpoint / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_export_without_permission_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    assert "Permission denied" in refused("--save-hf", "closed/model")


# config.toml and ~


def test_a_runs_own_configuration_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    places = ["--output-dir=~/run", "--save-hf=~/run/hf", "--save=~/saved", "--save-debug-rollout-data=~/rollouts"]
    assert main([*SMALL, *places]) == 0
    run = tmp_path / "home" / "run"
    assert (run / "hf" / "config.json").exists()
    text = (run / "config.toml").read_text()
    facts = text[text.index("\n[run]\n") :]
    for name, path in (("save_hf", run / "hf"), ("output_dir", run), ("save", tmp_path / "home" / "saved")):
        assert f'{name} = "{path}"' in facts
    for name in ("again", "and again"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert main(["--config", "~/run/config.toml"]) == 0
        (made,) = (tmp_path / name / "runs").iterdir()
        assert [path.name for path in (made / "checkpoints").iterdir()] == ["step_000000"]
    assert not (tmp_path / "and again" / "~").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "and again", "home"]
