"""Interrupts before the first step, errors that end a run in one message, and closed output streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from samples.errors import InputError, RunError
from tests.train.test_run_directory import SMALL
from train.cli import run_guarded
from train.inline import InlineRuntime
from train.local_ray import interrupts_held_back
from train.loop import StartInterrupt, StopRequest, stop_on_interrupt
from train.main import main

ACCELRL = Path(sys.executable).with_name("accelrl")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # Python runs the handler between two instructions


@pytest.mark.parametrize("moment", ["prepare", "start", "swallowed"])
def test_an_interrupt_during_start_up_trains_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], moment: str
) -> None:
    closed = []
    start, close = InlineRuntime.start, InlineRuntime.close

    def interrupted_start(self: InlineRuntime) -> None:
        if moment == "start":
            interrupt()
        start(self)
        try:
            interrupt()
        except KeyboardInterrupt:
            assert moment == "swallowed"

    def interrupted_facts(*_: Any) -> dict[str, Any]:
        interrupt()
        raise AssertionError("goes on after an interrupt")

    def noted_close(self: InlineRuntime) -> None:
        close(self)
        closed.append(True)

    if moment == "prepare":
        monkeypatch.setattr("train.prepare.run_facts", interrupted_facts)
    else:
        monkeypatch.setattr(InlineRuntime, "start", interrupted_start)
    monkeypatch.setattr(InlineRuntime, "close", noted_close)
    flags = ["--output-dir", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf")]
    assert main([*SMALL, *flags]) == 130
    printed = capfd.readouterr()
    assert printed.err == "accelrl: interrupted during start-up; nothing was trained\n"
    assert "untrained" not in printed.out
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert closed == ([] if moment == "prepare" else [True])
    assert (tmp_path / "run").exists() == (moment != "prepare")


def test_an_interrupt_before_the_first_step_exports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluate = InlineRuntime.evaluate

    def interrupted(self: InlineRuntime, rollout_id: int) -> dict[str, float]:
        interrupt()
        return evaluate(self, rollout_id)

    monkeypatch.setattr(InlineRuntime, "evaluate", interrupted)
    flags = ["--output-dir", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf"), "--eval-interval", "1"]
    assert main([*SMALL, *flags]) == 130
    assert not (tmp_path / "hf").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_once_started_the_first_interrupt_lets_the_step_end() -> None:
    stop = StopRequest()
    with stop_on_interrupt(stop):
        stop.start()
        interrupt()
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    with pytest.raises(StartInterrupt):
        StopRequest(requested=True).start()


@pytest.mark.parametrize("part", ["-m train", "console script"])
def test_an_interrupt_while_modules_are_imported_prints_no_traceback(tmp_path: Path, part: str) -> None:
    """Any of our modules may be the one; here it is the first after train.cli."""
    code = (
        "import sys, os, signal, runpy\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'train.safe_path': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['accelrl', 'train', '--print-config']\n"
    )
    if part == "-m train":
        code += "sys.argv.remove('train')\nrunpy.run_module('train', run_name='__main__')\n"
    else:
        code += "from train.cli import accelrl\nsys.exit(accelrl())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "accelrl: interrupted\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(tmp_path: Path, closed: str) -> None:
    for flags, status in (("train --print-config", 0), ("train --lr x", 2), ("", 2)):
        done = subprocess.run(
            ["bash", "-c", f"{ACCELRL} {flags} {closed}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_with_closed_output_keeps_its_files_free_of_what_it_prints(tmp_path: Path) -> None:
    flags = " ".join([*SMALL, "--progress", "plain", "--output-dir", str(tmp_path / "run")])
    done = subprocess.run(
        ["bash", "-c", f"{ACCELRL} train {flags} >&-"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().startswith('{"step": 0')
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


# Errors


def test_a_run_that_cannot_go_on_ends_with_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    from hooks.apply import SampleHookError, SampleHookTypeError
    from rollout.engines.errors import EngineError
    from train.checkpoint.errors import CheckpointWriteError
    from train.megatron.optimizer import NonFiniteGradientError

    for kind in (SampleHookError, SampleHookTypeError, EngineError, CheckpointWriteError, NonFiniteGradientError):

        def fails(kind: type[RunError] = kind) -> int:
            raise kind("what and why")

        assert run_guarded(fails) == 1
        assert capsys.readouterr().err == "accelrl: error: what and why\n"


class Peculiar(InputError):
    """An error that is not made of what it says."""

    def __init__(self, *, flag: str, value: int) -> None:
        super().__init__(f"{flag} {value}: no")


def test_a_workers_error_comes_through_whatever_it_is_made_of() -> None:
    from ray.exceptions import RayTaskError

    from train.actors import plain_errors

    cause = Peculiar(flag="--lr", value=3)
    with pytest.raises(Peculiar, match="--lr 3: no") as caught, plain_errors():
        raise RayTaskError("train", "traceback", cause, "ignored", 1, "ignored")
    assert caught.value is cause


CODE = """
def fails(args, group, **kwargs):
    raise ZeroDivisionError('no rewards')
def nonsense(args, group, **kwargs):
    return 'maybe'
def hook(args, sample):
    raise KeyError('label')
def hook_nonsense(args, sample):
    return 3
"""


@pytest.mark.parametrize(
    ("flag", "function", "status", "said"),
    [
        ("--dynamic-sampling-filter-path", "fails", 2, ("failed on group 0: ZeroDivisionError: no rewards", "line 3")),
        ("--dynamic-sampling-filter-path", "nonsense", 2, ("failed on group 0: TypeError: mine.nonsense", "'maybe'")),
        ("--rollout-sample-hook-path", "hook", 1, ("mine.hook failed on sample", "KeyError: 'label'", "line 7")),
        ("--rollout-sample-hook-path", "hook_nonsense", 1, ("mine.hook_nonsense returned 3",)),
    ],
)
def test_a_function_of_the_users_that_fails_is_named(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    flag: str,
    function: str,
    status: int,
    said: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("samples.loading._loaded", {})
    monkeypatch.setattr("hooks.apply._loaded", {})
    flags = ["--output-dir", str(tmp_path / "run"), "--user-code-dir", str(tmp_path), flag, f"mine.{function}"]
    assert main([*SMALL, *flags]) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("accelrl: error: ")
    assert all(text in line for text in said), line
    if flag.startswith("--dynamic"):
        assert line.startswith(f"accelrl: error: {flag} mine.{function} failed")


def test_a_model_that_is_not_finite_from_the_start_blames_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    from train.example import write_example

    files = write_example(tmp_path / "example", seed=0)
    weights = files.hf_checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    flags = ["--hf-checkpoint", str(files.hf_checkpoint), "--prompt-data", str(files.prompt_data)]
    flags += ["--label-key", "label", "--rm-type", "exact_match", "--output-dir", str(tmp_path / "run")]
    assert main([*SMALL, *flags]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "--hf-checkpoint" in line
    assert "--lr" not in line


def test_an_interrupt_while_ray_is_imported_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class HalfImported:
        """What an interrupted import leaves: the second one fails in another way."""

        tries = 0

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "ray":
                self.tries += 1
                if self.tries > 1:
                    raise AttributeError("partially initialized module 'ray'")
                interrupt()

    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [HalfImported(), *sys.meta_path])
    flags = ["--launcher", "ray", "--output-dir", str(tmp_path / "run")]
    assert main([*SMALL, *flags]) == 130
    assert capfd.readouterr().err == "accelrl: interrupted during start-up; nothing was trained\n"


def test_an_interrupt_while_ray_starts_waits_until_it_can_be_ended_whole() -> None:
    done = []

    def starting(interrupts: int) -> None:
        with interrupts_held_back():
            for _ in range(interrupts):
                interrupt()
            done.append(interrupts)

    for interrupts in (1, 2):
        with stop_on_interrupt(StopRequest()), pytest.raises(StartInterrupt):
            starting(interrupts)
    assert done == [1]  # a second one does not wait
