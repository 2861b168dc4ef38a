"""Real trainer and engine processes: what the engine answers from is the trainer's, whole, or nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.errors import AcceleratorError
from rollout.engines.errors import EngineError
from samples.errors import RunError
from tests.train.weight_sync_cases import (
    ProcessCalls,
    hf_greedy,
    plan,
    start_engine,
    start_trainer,
    write_served_model,
)
from train.weight_sync.updater import WeightUpdater

pytestmark = pytest.mark.slow
CHANNELS = ["tensor", "distributed", "disk", "disk_delta"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def processes(model_dir: Path) -> Iterator[ProcessCalls]:
    calls = ProcessCalls(start_trainer(model_dir), start_engine(model_dir))
    yield calls
    for process in (calls.trainer, calls.engine):
        process.end()


def opened(calls: ProcessCalls, channel: str, directory: Path, **settings) -> WeightUpdater:
    updater = WeightUpdater(calls, check_equal=True)
    updater.open(plan(channel, directory, **settings))
    return updater


def test_over_every_channel_the_engine_answers_as_the_trainers_export_does(processes, model_dir, tmp_path):
    with pytest.raises(EngineError, match="without weights"):
        processes.engine.call("greedy")
    version = -1
    expected = hf_greedy(model_dir)
    for channel in CHANNELS:
        updater = opened(processes, channel, tmp_path)
        first = updater.update(version := version + 1)
        assert processes.engine.call("greedy") == (expected, version)

        unchanged = updater.update(version := version + 1)
        assert processes.engine.call("greedy") == (expected, version)
        nbytes = 0 if channel == "disk_delta" else first["perf/update_weights_bytes"]
        assert unchanged["perf/update_weights_bytes"] == nbytes

        for _ in range(20):
            processes.trainer.call("train")
        updater.update(version := version + 1)
        export = tmp_path / f"export-{channel}"
        processes.trainer.call("save_hf", export)
        before, expected = expected, hf_greedy(export)
        assert processes.engine.call("greedy") == (expected, version)
        if channel == CHANNELS[0]:  # later ones may have learnt all that the greedy answer shows
            assert expected != before


@pytest.mark.parametrize("channel", ["tensor", "distributed", "disk_delta"])
def test_an_end_killed_in_the_middle_leaves_no_half_new_weights(channel, processes, model_dir, tmp_path):
    updater = opened(processes, channel, tmp_path)
    updater.update(0)
    before = processes.engine.call("greedy")
    processes.trainer.call("train")
    calls: list[str] = []

    def kill_trainer(call: str) -> None:
        calls.append(call)
        if calls.count("take") == 2 or call == "held":
            assert processes.engine.call("state") == ("0" if call == "held" else "updating-1")
            processes.trainer.kill()

    processes.before = kill_trainer
    with pytest.raises((RuntimeError, AcceleratorError), match=r"has died|the other side has gone"):
        updater.update(1)
    if channel == "disk_delta":  # the engine was not touched yet
        assert processes.engine.call("greedy") == before
    else:
        assert processes.engine.call("state") == "none"
        with pytest.raises(EngineError, match=r"(?s)has died|the other side has gone"):
            processes.engine.call("greedy")

    processes.before = lambda call: None
    processes.trainer = start_trainer(model_dir)
    updater = opened(processes, channel, tmp_path)
    updater.update(2)
    assert processes.engine.call("greedy") == (before[0], 2)

    def kill_engine(call: str) -> None:
        if call in ("take", "pull"):
            processes.engine.kill()

    processes.before = kill_engine
    with pytest.raises((RuntimeError, AcceleratorError), match=r"has died|the other side has gone"):
        updater.update(3)
    processes.before = lambda call: None
    processes.engine = start_engine(model_dir)
    metrics = opened(processes, channel, tmp_path).update(3)
    assert metrics["perf/update_weights_bytes"] > 0
    assert processes.engine.call("greedy") == (before[0], 3)


def test_memory_that_changes_on_the_way_costs_one_more_try_and_then_the_run(processes, model_dir, tmp_path):
    updater = opened(processes, "tensor", tmp_path, retries=1)
    updater.update(0)
    answer = processes.engine.call("greedy")[0]
    damaged: list[str] = []

    def damage(bucket) -> None:
        """Another hand in the shared memory, once in each of the tries that are to fail."""
        if len(damaged) >= failing:
            return
        damaged.append(bucket.source.path)
        with shared_memory_of(processes.trainer.process.pid, bucket.source.path).open("r+b") as file:
            file.seek(bucket.tensors[0].offset)
            file.write(b"\x7f\x7f\x7f\x7f")

    processes.with_bucket = damage
    failing = 1
    assert updater.update(1)["perf/update_weights_retries"] == 1
    assert processes.engine.call("greedy") == (answer, 1)

    damaged.clear()
    failing = 2
    with pytest.raises(RunError, match="arrived with checksum"):
        updater.update(2)
    assert len(set(damaged)) == 2  # the second try came over a channel of its own
    assert processes.engine.call("state") == "none"
    with pytest.raises(EngineError, match="arrived with checksum"):
        processes.engine.call("greedy")
    failing = 0
    assert updater.update(3)["perf/update_weights_retries"] == 2
    assert processes.engine.call("greedy") == (answer, 3)


def shared_memory_of(process: int, path: str) -> Path:
    """The file, which has lost its name, as one that the process holds open."""
    return next(entry for entry in Path(f"/proc/{process}/fd").iterdir() if os.readlink(entry).startswith(path))


def test_the_lease_ends_an_update_whose_trainer_and_driver_are_gone(processes, model_dir, tmp_path):
    opened(processes, "tensor", tmp_path).update(0)
    updater = opened(processes, "tensor", tmp_path, timeout=1.0)
    answer = processes.engine.call("greedy")[0]
    processes.trainer.call("begin", 1, None)
    processes.engine.call("begin", 1)
    processes.engine.call("take", processes.trainer.call("next_bucket"), 1)
    assert processes.engine.call("state") == "updating-1"
    processes.trainer.kill()
    deadline = time.monotonic() + 60
    while processes.engine.call("state") == "updating-1":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(EngineError, match=r"nothing came from the trainer for 1 s \(--weight-update-timeout\)"):
        processes.engine.call("greedy")
    processes.trainer = start_trainer(model_dir)
    updater = opened(processes, "tensor", tmp_path)
    updater.update(2)
    assert processes.engine.call("greedy") == (answer, 2)
