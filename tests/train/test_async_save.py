"""Checkpoints that are written while the run goes on: what they hold, when they are there, and how they fail."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from samples.errors import InputError, RunError
from tests.train.checkpoint_cases import TinyRun, make_saver, newest_whole, save_steps
from tests.train.trainer_cases import make_batch, make_trainer, run_config, write_model
from train.checkpoint import trainer_state
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.tensor_files import TensorFiles
from train.config.cli import parse


class Held:
    """Holds the writer at its first file until it is let go; or lets it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.go = threading.Event()
        finish = TensorFiles.finish

        def held(files: TensorFiles) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(60)
                if fails:
                    raise OSError(5, "Input/output error", "model.safetensors")
            finish(files)

        monkeypatch.setattr(TensorFiles, "finish", held)


def test_a_save_is_published_while_the_run_goes_on_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    held, run, notes = Held(monkeypatch), TinyRun(), []
    saver = make_saver(tmp_path, run, notes, async_save=True, save_interval=2, save_keep=1)
    for run.step in range(3):  # saves step 1
        saver.after_step(run.step)
    assert newest_whole(tmp_path) is None
    assert run.saving is not None
    threading.Timer(0.1, held.go.set).start()
    run.step = 3
    saver.after_step(3)  # waits for step 1, begins step 3
    assert "step_000001, written in" in notes[1]
    run.saving.end(60)
    assert newest_whole(tmp_path).step == 3
    run.step = 4
    saver.after_step(4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]  # --save-keep
    saver.finish()
    assert newest_whole(tmp_path).step == 4
    assert not saver.failed


def test_the_end_of_a_run_waits_for_what_is_being_written(tmp_path, monkeypatch):
    held, run = Held(monkeypatch), TinyRun()
    saver = make_saver(tmp_path, run, async_save=True)
    saver.after_step(0)
    threading.Timer(0.1, held.go.set).start()
    saver.finish()
    assert newest_whole(tmp_path).step == 0
    assert not saver.failed


def test_a_writer_that_fails_ends_the_run_at_the_next_step_in_its_own_words(tmp_path, monkeypatch):
    save_steps(tmp_path, range(1))
    held, run = Held(monkeypatch, fails=True), TinyRun(step=1)
    saver = make_saver(tmp_path, run, async_save=True, resumed_from=0)
    saver.after_step(1)
    held.go.set()
    run.saving.end(60)
    with pytest.raises(RunError, match=r"no checkpoint of step 2 .*model.safetensors: Input/output error.*step_000000"):
        saver.after_step(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000"]


def test_a_writer_that_fails_at_the_end_of_a_run_is_made_up_for(tmp_path, monkeypatch):
    held, run, notes = Held(monkeypatch, fails=True), TinyRun(), []
    saver = make_saver(tmp_path, run, notes, async_save=True)
    saver.after_step(0)
    held.go.set()
    saver.finish()
    assert any("WARNING: --async-save: no checkpoint of step 1" in note for note in notes)
    assert newest_whole(tmp_path).step == 0
    assert not saver.failed


def test_a_copy_is_what_a_save_would_have_written_although_training_goes_on(cpu_megatron, tmp_path):
    model_dir = write_model(tmp_path / "model")
    trainer = make_trainer(run_config(model_dir))
    batch = make_batch(model_dir)
    try:
        trainer.train(batch, 0)
        saved, copied = tmp_path / "saved", tmp_path / "copied"
        for directory in (saved, copied):
            directory.mkdir()
        state = trainer.save_state(saved)
        snapshot = trainer.snapshot_state()
        trainer.train(batch, 1)
        assert snapshot.write(copied) == state  # sizes and checksums of every file
        assert snapshot.tensors == {}  # the memory is given back
        changed = tmp_path / "changed"
        changed.mkdir()
        assert trainer.save_state(changed) != state
    finally:
        trainer.close()
    weights = load_file(copied / "model.safetensors")
    assert weights.keys() == load_file(saved / "model.safetensors").keys()
    assert all(torch.equal(tensor, load_file(saved / "model.safetensors")[name]) for name, tensor in weights.items())


def test_a_model_whose_tokenizer_cannot_be_read_any_more_costs_a_save_and_not_the_run(
    cpu_megatron, tmp_path, monkeypatch
):
    trainer = make_trainer(run_config(write_model(tmp_path / "model")))

    def unread(*_: object) -> dict[str, bytes]:
        raise PermissionError(13, "Permission denied", "tokenizer.json")

    monkeypatch.setattr(trainer_state, "_model_files", unread)
    try:
        trainer.release_memory()
        (tmp_path / "saved").mkdir()
        for save in (lambda: trainer.save_state(tmp_path / "saved"), trainer.snapshot_state):
            with pytest.raises(CheckpointWriteError, match=r"tokenizer\.json"):
                save()
            assert trainer._memory.released == ("weights", "optimizer")  # as between any two turns
    finally:
        trainer.close()


def test_a_copy_that_cannot_be_written_says_which_file(tmp_path):
    snapshot = trainer_state.TrainerSnapshot({"model": {"a": torch.zeros(3)}}, {}, 0)
    with pytest.raises(CheckpointWriteError, match=r"model\.part-0: No such file or directory"):
        snapshot.write(tmp_path / "nowhere")


@pytest.mark.parametrize("flags", [(), ("--save", "somewhere")])
def test_it_is_refused_where_the_end_of_the_run_would_wait_for_it_anyway(flags: tuple[str, ...], tmp_path: Path):
    with pytest.raises(InputError, match="--async-save: only the last step is saved, if any"):
        parse(["--async-save", *(word.replace("somewhere", str(tmp_path)) for word in flags)])
    assert parse(["--async-save", "--save-interval", "2"]).checkpoint.async_save
