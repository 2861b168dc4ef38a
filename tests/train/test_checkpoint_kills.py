"""A save may end at any moment, by a kill or by a full disk: a whole checkpoint is there all the same."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from samples.errors import RunError
from tests.train.checkpoint_cases import TinyRun, make_saver, newest_whole, save_steps

pytestmark = pytest.mark.slow

_TOUCHES_FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def _fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a child, which ends without any clean-up of ours."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        except BaseException as error:  # noqa: BLE001 - the parent sees the status
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def _die_at(operation: int, counted: list[int]) -> Callable[[str, Any], None]:
    def hook(event: str, _arguments: Any) -> None:
        if event in _TOUCHES_FILES:
            counted[0] += 1
            if counted[0] == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


SYNC_AND_ASYNC = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])


@SYNC_AND_ASYNC
def test_a_kill_before_any_one_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, async_save: bool):
    """Saves steps 0 and 1, keeping one, and dies before the first, second, ... operation on files."""
    for operation in range(1, 1000):
        directory = tmp_path / str(operation)

        def save(directory: Path = directory, operation: int = operation) -> None:
            sys.addaudithook(_die_at(operation, [0]))
            save_steps(directory, range(2), elements=100, save_keep=1, async_save=async_save).finish()

        child = _fork(save)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        checkpoint = newest_whole(directory)
        steps = [int(path.name[-6:]) for path in directory.glob("step_*")]
        if not killed:
            break
        assert len(steps) <= 2  # the new one is in place before the old one goes
        if checkpoint is not None:
            assert checkpoint.step == max(steps)
        following = save_steps(directory, range(2, 3), elements=100, save_keep=1, async_save=async_save)
        following.finish()
        assert not following.failed
        assert [path.name for path in directory.iterdir()] == ["step_000002"]  # nothing of the kill is left
        shutil.rmtree(directory)
    assert operation > 50
    assert checkpoint is not None
    assert checkpoint.step == 1


@SYNC_AND_ASYNC
def test_a_hundred_kills_at_random_moments_never_leave_a_half_checkpoint(tmp_path: Path, async_save: bool):
    moments = random.Random(7)
    started = time.perf_counter()
    save_steps(tmp_path, range(1))
    one_save = time.perf_counter() - started
    last = 0
    inside = 0
    for _ in range(100):

        def save(start: int = last + 1) -> NoReturn:
            run = TinyRun()
            saver = make_saver(tmp_path, run, resumed_from=start - 1, save_keep=2, async_save=async_save)
            for step in range(start, start + 10**6):
                run.step = step
                saver.after_step(step)
                if saver.failed:
                    raise AssertionError("a save failed")
            raise AssertionError("never killed")

        child = _fork(save)
        time.sleep(moments.uniform(0.0, 4 * one_save))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status)
        inside += any(tmp_path.glob(".tmp-*"))
        checkpoint = newest_whole(tmp_path)
        assert checkpoint is not None
        assert checkpoint.step >= last
        last = checkpoint.step
    assert last > 0
    assert inside > 0  # some kills fell into a save or a removal; how many depends on the machine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system is not permitted here: {error}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_and_is_said_loudly(small_disk: Path):
    directory = small_disk / "checkpoints"  # 480 kB each: two fit
    notes: list[str] = []
    saver = save_steps(directory, range(3), notes)
    assert saver.failed
    assert "WARNING: no checkpoint of step 3" in notes[-1]
    assert "No space left on device" in notes[-1]
    assert "step_000001" in notes[-1]
    checkpoint = newest_whole(directory)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert not any(directory.glob(".tmp-*"))  # the room is given back
    (small_disk / "metrics.jsonl").write_text("x" * 10_000)


def test_a_full_disk_behind_the_run_ends_it_at_the_next_step_and_leaves_the_checkpoint_before(small_disk: Path):
    directory = small_disk / "checkpoints"
    notes: list[str] = []
    run = TinyRun()
    saver = make_saver(directory, run, notes, async_save=True)
    for run.step in range(3):
        saver.after_step(run.step)
    assert run.saving is not None
    run.saving.end(60)
    with pytest.raises(RunError, match=r"--async-save: no checkpoint of step 3 .*No space left .* step_000001"):
        saver.after_step(3)
    checkpoint = newest_whole(directory)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert not any(directory.glob(".tmp-*"))


def test_saving_goes_on_once_there_is_room_again(small_disk: Path):
    directory = small_disk / "checkpoints"
    saver = save_steps(directory, range(3))
    assert saver.failed
    shutil.rmtree(directory / "step_000000")
    saver.finish()
    assert not saver.failed


@pytest.mark.parametrize("limit", [1000, 50_000, 79_000])
def test_a_file_that_cannot_grow_is_no_checkpoint(tmp_path: Path, limit: int):
    """The limit on the size of a file stands in for a full disk where nothing can be mounted."""
    save_steps(tmp_path, range(1))

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        notes: list[str] = []
        saver = save_steps(tmp_path, range(1, 2), notes)
        assert saver.failed
        assert "File too large" in notes[-1]

    assert os.waitpid(_fork(save), 0)[1] == 0
    checkpoint = newest_whole(tmp_path)
    assert checkpoint is not None
    assert not any(tmp_path.glob(".tmp-*"))
