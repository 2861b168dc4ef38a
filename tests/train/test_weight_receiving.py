"""What the two ends of a weight channel refuse, and what the engine answers from then: nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.engines.errors import EngineError
from samples.errors import InputError, RunError
from tests.train.weight_sync_cases import BlockingEngine, hf_greedy, plan, selected_accelerator, write_served_model
from train.config.checks.weight_updates import weight_update_problems
from train.config.run import RunConfig
from train.weight_sync import updater as updating
from train.weight_sync.calls import DirectCalls
from train.weight_sync.factory import chosen_channel, server_channel
from train.weight_sync.plan import Offer
from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd
from train.weight_sync.updater import WeightUpdater


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


class Ends:
    """Both ends in this process; ``weights`` may be changed between updates."""

    def __init__(self, model_dir: Path) -> None:
        self.weights = load_file(model_dir / "model.safetensors")
        self.engine = BlockingEngine(model_dir)
        accelerator = selected_accelerator()
        self.sending = SendingEnd(lambda: iter(self.weights.items()), accelerator, rank=0)
        self.receiving = ReceivingEnd(self.engine, accelerator)

    def open(
        self, channel: str, directory: Path, *, check_equal: bool = True, note=lambda _: None, **settings
    ) -> WeightUpdater:
        updater = WeightUpdater(DirectCalls(self.sending, self.receiving), check_equal=check_equal, note=note)
        updater.open(plan(channel, directory, **settings))
        return updater

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()
        self.engine.close()


@pytest.fixture
def ends(model_dir: Path) -> Iterator[Ends]:
    ends = Ends(model_dir)
    yield ends
    ends.close()


@pytest.mark.parametrize("damage", ["byte", "lost", "cut"])
def test_a_bucket_that_does_not_arrive_as_it_was_sent_stops_the_engine(damage, ends, model_dir, tmp_path):
    updater = ends.open("tensor", tmp_path)
    updater.update(0)
    assert ends.engine.greedy() == (hf_greedy(model_dir), 0)
    take = ends.receiving.take
    count = 0

    def damaging(bucket, version):
        nonlocal count
        count += 1
        if count == 2:
            if damage == "lost":
                return
            first = bucket.tensors[0]
            changed = replace(first, checksum="0" * 8) if damage == "byte" else replace(first, shape=(1,))
            bucket = replace(bucket, tensors=(changed, *bucket.tensors[1:]))
        take(bucket, version)

    ends.receiving.take = damaging
    with pytest.raises(RunError, match="tensors arrived" if damage == "lost" else "arrived with checksum"):
        updater.update(1)
    assert ends.engine.state() == "none"
    with pytest.raises(EngineError, match="send a whole update"):
        ends.engine.greedy()
    ends.receiving.take = take
    updater.update(2)
    assert ends.engine.greedy() == (hf_greedy(model_dir), 2)


def test_a_trainer_that_falls_silent_loses_its_lease(ends, tmp_path):
    ends.open("tensor", tmp_path, timeout=0.2)
    ends.sending.begin(0, None)
    ends.receiving.begin(0)
    ends.receiving.take(ends.sending.next_bucket(), 0)
    assert ends.engine.state() == "updating-0"
    deadline = time.monotonic() + 60
    while ends.engine.state() != "none":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(EngineError, match=r"nothing came from the trainer for 0.2 s \(--weight-update-timeout\)"):
        ends.engine.greedy()


def test_a_lease_that_runs_out_too_late_takes_nothing_back(ends, tmp_path):
    updater = ends.open("in_process", tmp_path)
    leases = []
    end = ends.receiving._end_lease
    ends.receiving._end_lease = lambda: (leases.append(ends.receiving._lease), end())
    updater.update(0)
    late = {lease for lease in leases if lease is not None}
    assert late
    for lease in late:  # as if its time had been up in the moment in which it was cancelled
        lease.function(*lease.args)
    assert ends.engine.greedy()[1] == 0
    begin = ends.receiving.begin

    def beginning(version):
        begin(version)
        for lease in late:
            lease.function(*lease.args)

    ends.receiving.begin = beginning
    updater.update(1)
    assert ends.engine.greedy()[1] == 1


@pytest.mark.parametrize("mixture", [False, True])
def test_a_delta_holds_what_changed_and_a_new_engine_gets_everything(mixture, tmp_path, tmp_path_factory):
    model_dir = write_served_model(tmp_path_factory.mktemp("model"), mixture=mixture)
    ends = Ends(model_dir)
    try:
        check_deltas(ends, model_dir, tmp_path)
    finally:
        ends.close()


def check_deltas(ends: Ends, model_dir: Path, tmp_path: Path) -> None:
    updater = ends.open("disk_delta", tmp_path)
    updater._check_equal = False  # it sends everything
    whole = updater.update(0)["perf/update_weights_bytes"]
    assert whole == sum(tensor.nbytes for tensor in ends.weights.values())
    norm = ends.weights["model.norm.weight"] = -ends.weights["model.norm.weight"]
    assert updater.update(1)["perf/update_weights_bytes"] == norm.nbytes
    (directory,) = tmp_path.glob("accelrl-weights-*/update-*")  # the older one is gone
    assert set(load_file(directory / "model-00001.safetensors")) == {"model.norm.weight"}
    expected = {**load_file(model_dir / "model.safetensors"), "model.norm.weight": norm}
    assert ends.engine.differing_weights(expected) == []

    ends.engine.close()
    ends.engine = ends.receiving._engine = BlockingEngine(model_dir)
    assert updater.update(2)["perf/update_weights_bytes"] == whole
    assert ends.engine.differing_weights(expected) == []


def test_a_file_that_is_not_the_trainers_is_found_out(ends, tmp_path):
    updater = ends.open("disk", tmp_path)
    updater.update(0)
    finish = ends.sending.finish

    def damaging():
        summary = finish()
        file = sorted(Path(summary.directory).glob("*.safetensors"))[-1]
        tensors = load_file(file)
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] + 1}, file)
        return summary

    ends.sending.finish = damaging
    with pytest.raises(RunError, match="is not what the trainer wrote"):
        updater.update(1)
    with pytest.raises(EngineError, match="is not what the trainer wrote"):
        ends.engine.greedy()


def test_check_weight_update_equal_names_what_the_engine_holds_differently(ends, tmp_path):
    updater = ends.open("in_process", tmp_path)
    commit = ends.receiving.commit

    def committing(summary):
        commit(summary)
        ends.weights["model.norm.weight"] = ends.weights["model.norm.weight"] + 1

    ends.receiving.commit = committing
    with pytest.raises(RunError, match=r"version 0 .* other values .* 1 tensors, such as model.norm.weight"):
        updater.update(0)
    with pytest.raises(EngineError, match="check-weight-update-equal"):
        ends.engine.greedy()


@pytest.mark.parametrize(("channel", "words"), [("tensor", "different machines"), ("disk", "--weight-update-dir")])
def test_an_end_that_does_not_see_what_the_other_wrote_is_refused(channel, words, ends, tmp_path):
    with pytest.raises(InputError, match=words):
        ends.receiving.open(plan(channel, tmp_path), Offer(str(tmp_path / "not_here"), "word"))


def test_nothing_is_left_of_a_channel_that_was_closed(ends, tmp_path):
    for channel in ("tensor", "disk"):
        ends.open(channel, tmp_path).update(0)
    ends.sending.close()
    assert list(tmp_path.iterdir()) == []
    assert [line for line in _own_mappings() if "(deleted)" not in line] == []


def _own_mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    return [line for line in lines if "accelrl-weights-" in line]


def test_the_channel_follows_from_launcher_and_engine():
    def config(channel: str, launcher: str = "ray", engine: str = "torch") -> RunConfig:
        sections = {"weights": {"weight_update_channel": channel}, "job": {"launcher": launcher}}
        return RunConfig.model_validate(sections | {"rollout": {"rollout_engine": engine}})

    assert [chosen_channel(config(name)) for name in ("auto", "tensor", "distributed", "disk", "disk_delta")] == [
        "tensor", "tensor", "distributed", "disk", "disk_delta",
    ]  # fmt: skip
    assert chosen_channel(config("auto", "inline")) == chosen_channel(config("tensor", "inline")) == "in_process"
    assert chosen_channel(config("disk", engine="sglang")) == "tensor"
    assert [server_channel(config(name, engine="sglang")) for name in ("auto", "disk", "tensor")] == [
        "disk", "disk", "tensor",
    ]  # fmt: skip
    assert "--launcher ray" in next(weight_update_problems(config("distributed", "inline")))
    assert "use disk, tensor or distributed" in next(weight_update_problems(config("disk_delta", engine="sglang")))
    assert not list(weight_update_problems(config("disk", engine="sglang")))


def test_an_update_of_nan_weights_is_equal_to_itself(ends, tmp_path):
    ends.weights["model.norm.weight"] = torch.full_like(ends.weights["model.norm.weight"], torch.nan)
    ends.open("tensor", tmp_path).update(0)
    assert ends.engine.state() == "0"


@pytest.mark.parametrize("channel", ["tensor", "in_process", "disk", "disk_delta"])
def test_an_update_that_failed_is_made_again_with_everything(channel, ends, model_dir, tmp_path):
    notes: list[str] = []
    updater = ends.open(channel, tmp_path, check_equal=False, retries=1, note=notes.append)
    whole = updater.update(0)["perf/update_weights_bytes"]
    update_weights = ends.engine.update_weights
    left = 1

    def failing(tensors):
        nonlocal left
        if left:
            left -= 1
            raise EngineError("the server said no")
        update_weights(tensors)

    ends.engine.update_weights = failing
    ends.weights["model.norm.weight"] = -ends.weights["model.norm.weight"]
    metrics = updater.update(1)
    assert metrics == {"perf/update_weights_bytes": whole, "perf/update_weights_retries": 1}
    assert "version 1 failed (the server said no); everything is sent once more" in notes[0]
    assert ends.engine.state() == "1"
    assert ends.engine.differing_weights(ends.weights) == []

    left = 2
    ends.weights["model.norm.weight"] = -ends.weights["model.norm.weight"]
    with pytest.raises(EngineError, match=r"^the server said no$"):
        updater.update(2)
    assert left == 0
    assert ends.engine.state() == "none"
    assert updater.update(3)["perf/update_weights_retries"] == 2
    assert ends.engine.differing_weights(ends.weights) == []


def test_what_would_fail_again_is_not_tried_again(ends, tmp_path):
    updater = ends.open("tensor", tmp_path, retries=5)
    ends.weights["no_such.weight"] = torch.zeros(1)
    with pytest.raises(InputError, match=r"no_such.weight is no tensor of this model"):
        updater.update(0)
    del ends.weights["no_such.weight"]

    def breaking():
        yield next(iter(ends.weights.items()))
        raise RuntimeError("a rank has gone")

    weights, ends.sending._weights = ends.sending._weights, breaking
    with pytest.raises(RuntimeError, match="a rank has gone"):
        updater.update(1)
    ends.sending._weights = weights
    with pytest.raises(RunError, match="broke off in the middle"):
        updater.update(2)


def test_an_update_given_up_draws_what_is_left_so_that_ranks_stay_in_step(ends, tmp_path):
    ends.open("tensor", tmp_path)
    drawn: list[str] = []

    def gathering():
        for name, tensor in ends.weights.items():
            drawn.append(name)
            yield name, tensor

    ends.sending._weights = gathering
    ends.sending.begin(0, None)
    ends.sending.next_bucket()
    assert len(drawn) < len(ends.weights)
    assert ends.sending.cancel()
    assert drawn == list(ends.weights)


def test_many_buckets_of_a_mixture_of_experts_leave_an_unchanged_engine_as_it_was(tmp_path):
    """skyrl 1737: greedy answers before and after an update without a change, and those of transformers, are equal."""
    model_dir = write_served_model(tmp_path / "model", mixture=True)
    ends = Ends(model_dir)
    try:
        updater = ends.open("tensor", tmp_path, bucket_bytes=1024)
        assert updater.update(0)["perf/update_weights_bytes"] > 20 * 1024
        before = ends.engine.greedy()
        updater.update(1)
        assert before == (hf_greedy(model_dir), 0)
        assert ends.engine.greedy() == (before[0], 1)
    finally:
        ends.close()


class ThreadCalls:
    """``train.weight_sync.updater.Calls``: each end on a thread of its own, so that one can fall silent."""

    def __init__(self, ends: Ends) -> None:
        self.threads = {end: ThreadPoolExecutor(1) for end in (ends.sending, ends.receiving)}
        self.ends = ends

    def sending(self, call: str, *arguments: object) -> list[Future]:
        return [self.threads[self.ends.sending].submit(getattr(self.ends.sending, call), *arguments)]

    def receiving(self, call: str, *arguments: object) -> Future:
        return self.threads[self.ends.receiving].submit(getattr(self.ends.receiving, call), *arguments)

    def wait(self, begun: list[Future], timeout: float) -> list[object]:
        return [future.result(timeout) for future in begun]


def test_an_engine_that_hangs_ends_the_update_in_time_and_one_that_fails_is_quoted(ends, tmp_path, monkeypatch):
    """trl 6797: the update has a time limit, and the error holds the engine's own words."""
    monkeypatch.setattr(updating, "_GIVE_UP", 0.1)
    updater = WeightUpdater(ThreadCalls(ends), check_equal=False)
    updater.open(plan("tensor", tmp_path, timeout=30.0))
    real = ends.engine.update_weights

    def failing(tensors: object) -> None:
        raise EngineError("the server says: CUDA error 700")

    ends.receiving._engine = Changed(ends.engine, update_weights=failing)
    with pytest.raises(EngineError, match="the server says: CUDA error 700"):
        updater.update(0)
    release = threading.Event()

    def hanging(tensors: object) -> None:
        release.wait(60)
        real(tensors)

    ends.receiving._engine = Changed(ends.engine, update_weights=hanging)
    updater.open(plan("tensor", tmp_path, timeout=0.3))
    says = r"step 'take' over --weight-update-channel tensor was not done within --weight-update-timeout 0.3 s"
    with pytest.raises(RunError, match=says):
        updater.update(1)
    release.set()
    ends.receiving._engine = ends.engine
    updater.open(plan("tensor", tmp_path))
    updater.update(2)
    assert ends.engine.state() == "2"


class Changed:
    """An engine some of whose calls are others."""

    def __init__(self, engine: BlockingEngine, **calls: object) -> None:
        self._engine, self._calls = engine, calls

    def __getattr__(self, name: str) -> object:
        return self._calls.get(name) or getattr(self._engine, name)
