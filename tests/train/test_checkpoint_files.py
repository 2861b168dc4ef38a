"""The parts of a checkpoint: tensor files, generators, metrics that are wound back, and when it is time to save."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from accel.backends.cpu import CpuAccelerator
from tests.train.checkpoint_cases import TinyRun, make_saver, newest_whole, save_steps
from train.checkpoint.directory import checkpoint_steps
from train.checkpoint.generators import generator_states, restore_generators, seed_generators
from train.checkpoint.metrics_file import rewind_metrics
from train.checkpoint.tensor_files import TensorFiles, file_checksum
from train.megatron.weights.binding import Shard
from train.megatron.weights.checkpoint import HfCheckpoint

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(shapes=SHAPES, dtype=DTYPES, shard_bytes=st.sampled_from([1, 100, 10**9]))
def test_tensors_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtype: torch.dtype, shard_bytes: int
):
    directory = tmp_path_factory.mktemp("files")
    tensors = {f"layer.{i}.weight": torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}
    writer = TensorFiles(directory, "exp_avg", shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    assert {path.name for path in directory.iterdir()} == set(writer.files)
    for name, facts in writer.files.items():
        assert (directory / name).stat().st_size == facts.bytes
        assert file_checksum(directory / name) == facts.crc32
    read = {}
    for path in directory.glob("*.safetensors"):
        read |= load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)
    with HfCheckpoint(directory, "--load", "exp_avg") as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(Shard(name, tuple(tensor.shape), None, 0, 0)), tensor)


def test_generators_go_on_where_they_were():
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    try:
        random.gauss(0, 1)  # leaves a second number waiting
        np.random.standard_normal()
        states = json.loads(json.dumps(generator_states(CpuAccelerator())))
        drawn = (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        restore_generators(states, CpuAccelerator())
        again = (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
        assert again == drawn
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class OwnGenerator(CpuAccelerator):
    """The host, with a device's generator beside its own."""

    name = "owngenerator"
    capabilities = replace(CpuAccelerator.capabilities, own_generator=True)

    def __init__(self, name: str = "owngenerator"):
        super().__init__()
        self.name = name
        self.generator = torch.Generator()

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    def rng_state(self, index=None):
        return self.generator.get_state()

    def set_rng_state(self, state, index=None):
        self.generator.set_state(state)


def drawn(accelerator):
    device = torch.rand(2, generator=accelerator.generator).tolist()
    return random.random(), np.random.rand(), torch.rand(2).tolist(), device


@pytest.fixture
def generators_as_they_were():
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.usefixtures("generators_as_they_were")
def test_a_seed_begins_every_generator_of_a_process():
    accelerator = OwnGenerator()
    first, again, other = [(seed_generators(seed, accelerator), drawn(accelerator))[1] for seed in (3, 3, 4)]
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.usefixtures("generators_as_they_were")
def test_the_devices_generator_goes_on_on_the_same_accelerator_only():
    accelerator, other = OwnGenerator(), OwnGenerator("another")
    states = json.loads(json.dumps(generator_states(accelerator)))
    expected = drawn(accelerator)
    restore_generators(states, accelerator)
    assert drawn(accelerator) == expected
    before = other.rng_state()
    restore_generators(states, other)
    assert torch.equal(other.rng_state(), before)


def test_metrics_are_wound_back_to_the_step_of_the_checkpoint(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "train/loss": step / 10}) + "\n" for step in range(6)) + '{"st')
    kept, removed = rewind_metrics(path, 3)
    assert [row["step"] for row in kept] == [0, 1, 2, 3]
    assert removed == 2
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
    assert rewind_metrics(path, 3) == (kept, 0)
    assert rewind_metrics(tmp_path / "none.jsonl", 3) == ([], 0)


def test_a_run_saves_when_it_is_due_and_its_last_step_once(tmp_path: Path):
    run = TinyRun(elements=10)
    saver = make_saver(tmp_path, run, save_interval=3)
    for run.step in range(8):
        saver.after_step(run.step)
    assert checkpoint_steps(tmp_path) == [2, 5]
    saver.finish()
    assert checkpoint_steps(tmp_path) == [2, 5, 7]
    written = (tmp_path / "step_000007" / "manifest.json").stat().st_mtime_ns
    saver.finish()
    assert (tmp_path / "step_000007" / "manifest.json").stat().st_mtime_ns == written
    assert not saver.failed


def test_a_resumed_run_that_makes_no_step_saves_nothing(tmp_path: Path):
    make_saver(tmp_path, TinyRun(elements=10), resumed_from=4).finish()
    assert checkpoint_steps(tmp_path) == []


def test_old_checkpoints_go_once_the_new_one_is_there(tmp_path: Path):
    save_steps(tmp_path, range(5), elements=10, save_keep=2)
    assert checkpoint_steps(tmp_path) == [3, 4]
    assert newest_whole(tmp_path) is not None
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_directory_that_cannot_be_written_is_said_and_tried_again(tmp_path: Path):
    (tmp_path / "saved").write_text("a file")
    notes: list[str] = []
    run = TinyRun(elements=10)
    saver = make_saver(tmp_path / "saved", run, notes)
    saver.after_step(0)
    assert saver.failed
    assert "WARNING: no checkpoint of step 1" in notes[0]
    (tmp_path / "saved").unlink()
    saver.finish()
    assert not saver.failed
    assert checkpoint_steps(tmp_path / "saved") == [0]
