"""``--release-train``: the trainer's state while no process holds it, as the files of a checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.manifest import TrainerState


@dataclass(frozen=True)
class SavedTrainer:
    """What a trainer begins from: files as ``save_trainer_state`` wrote them. ``Checkpoint`` is another such start."""

    directory: Path
    state: TrainerState

    @property
    def optimizer_steps(self) -> int:
        return self.state.optimizer_steps


class ReleasedState:
    """One state at a time in ``directory``, which all trainer ranks see and which ends with the run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self.latest: SavedTrainer | None = None

    def begin(self) -> Path:
        """An empty directory for the next state; the one before stays until that is ``keep``-ed."""
        if self.latest is None:
            shutil.rmtree(self._directory, ignore_errors=True)  # of a part of this run that was killed
        self._number += 1
        work = self._directory / str(self._number)
        work.mkdir(parents=True)
        return work

    def keep(self, work: Path, state: TrainerState) -> SavedTrainer:
        before, self.latest = self.latest, SavedTrainer(work, state)
        if before is not None:
            shutil.rmtree(before.directory)
        return self.latest

    def copy_to(self, directory: Path) -> TrainerState:
        """Put the state's files into a checkpoint. Raises CheckpointWriteError."""
        assert self.latest is not None
        for name in self.latest.state.files:
            source, target = self.latest.directory / name, directory / name
            try:
                try:
                    os.link(source, target)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(source, target)
                    with target.open("rb") as file:
                        os.fsync(file.fileno())
            except OSError as error:
                raise CheckpointWriteError(f"{name}: {error.strerror or error}") from error
        return self.latest.state

    def close(self) -> None:
        self.latest = None
        shutil.rmtree(self._directory, ignore_errors=True)
