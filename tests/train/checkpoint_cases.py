"""A run whose whole state is three small tensors that say which step they are of, saved by the real saver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from train.checkpoint.background import BackgroundSave, Published
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.finding import check_files, find_checkpoint
from train.checkpoint.manifest import (
    UNWRITTEN,
    Checkpoint,
    FileFacts,
    Manifest,
    ModelFacts,
    RolloutState,
    RunState,
    TrainerState,
)
from train.checkpoint.saver import CheckpointSaver, RunIdentity
from train.checkpoint.tensor_files import TensorFiles
from train.checkpoint.trainer_state import TrainerSnapshot
from train.config.run import RunConfig

STEMS = ("model", "exp_avg", "exp_avg_sq")
NO_MODEL = ModelFacts(config={"model_type": "none"}, tokenizer=0, weights=0)


@dataclass
class TinyRun:
    """Stands where a runtime stands: every tensor of step n is full of n."""

    step: int = 0
    elements: int = 20_000
    saving: BackgroundSave | None = None

    def save_state(self, directory: Path) -> RunState:
        files: dict[str, FileFacts] = {}
        try:
            for stem in STEMS:
                writer = TensorFiles(directory, stem, shard_bytes=self.elements * 4 + 1)
                for name in ("a", "b"):
                    writer.add(name, torch.full((self.elements,), float(self.step)))
                writer.finish()
                files |= writer.files
        except OSError as error:
            raise CheckpointWriteError(str(error.strerror)) from error
        return self._state(TrainerState(files=files, optimizer_steps=self.step))

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        copies = {stem: {name: torch.full((self.elements,), float(self.step)) for name in ("a", "b")} for stem in STEMS}
        snapshot = TrainerSnapshot(copies, {}, self.step, shard_bytes=self.elements * 4 + 1)
        self.saving = BackgroundSave(snapshot, work, draft(self._state(UNWRITTEN)))

    def saved(self, *, wait: bool) -> Published | None:
        assert self.saving is not None
        return self.saving.outcome(wait=wait)

    def _state(self, trainer: TrainerState) -> RunState:
        rollout = RolloutState(source={"position": self.step}, generators={})
        return RunState(weight_version=self.step, trainer=trainer, rollout=rollout)


def make_saver(
    directory: Path, run: TinyRun, notes: list[str] | None = None, *, resumed_from: int | None = None, **settings: int
) -> CheckpointSaver:
    config = RunConfig.model_validate({"checkpoint": {"save": str(directory), "save_interval": 1} | settings})
    note = (lambda _: None) if notes is None else notes.append
    identity = RunIdentity("run", NO_MODEL, config)
    return CheckpointSaver(directory, identity, run, note=note, resumed_from=resumed_from)


def save_steps(
    directory: Path, steps: range, notes: list[str] | None = None, elements: int = 20_000, **settings: int
) -> CheckpointSaver:
    run = TinyRun(elements=elements)
    saver = make_saver(directory, run, notes, **settings)
    for run.step in steps:
        saver.after_step(run.step)
    return saver


def newest_whole(directory: Path) -> Checkpoint | None:
    """What ``--load auto`` takes, every file of it checked against the manifest and against the step."""
    checkpoint = find_checkpoint("auto", directory)
    if checkpoint is not None:
        check_files(checkpoint)
        assert checkpoint.manifest.state.rollout.source == {"position": checkpoint.step}
        assert len([name for name in checkpoint.manifest.files if name.endswith(".safetensors")]) == 2 * len(STEMS)
        for name in checkpoint.manifest.files:
            if name.endswith(".safetensors"):
                for tensor in load_file(checkpoint.directory / name).values():
                    assert bool((tensor == checkpoint.step).all())
    return checkpoint
