"""Real trainer and engine processes: what the engine answers from is the trainer's, whole, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.errors import AcceleratorError
from rollout.engines.errors import EngineError
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


def opened(calls: ProcessCalls, channel: str, directory: Path) -> WeightUpdater:
    updater = WeightUpdater(calls, check_equal=True)
    updater.open(plan(channel, directory))
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
