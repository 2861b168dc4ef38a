"""``--async-save``: a copy of the state in host memory, written and published by a thread while training goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from train.checkpoint.directory import CheckpointDirectory
from train.checkpoint.manifest import Manifest, TrainerState


class Snapshot(Protocol):
    """What nothing that follows changes any more (``trainer_state.TrainerSnapshot``)."""

    def write(self, directory: Path) -> TrainerState:
        """Write the trainer's files; raises CheckpointWriteError."""
        ...


@dataclass(frozen=True)
class Published:
    """A checkpoint under its final name. ``seconds``: that writing it took."""

    checkpoint: Path
    seconds: float


class BackgroundSave:
    """Begins at once. ``work``: the unfinished checkpoint, with the rollout side's files in it; ``draft``: its manifest
    but for what the trainer's files will be. Where it fails, ``work`` is removed."""

    def __init__(self, snapshot: Snapshot, work: Path, draft: Manifest) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._work, self._draft = work, draft
        self._published: Published | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save of step {draft.step}", daemon=True)
        self._thread.start()

    def outcome(self, *, wait: bool) -> Published | None:
        """What was published, or None while it is being written. Raises what kept it from being."""
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        return self._published

    def end(self, timeout: float) -> None:
        """Give a save that is under way so many seconds; the process may end then."""
        self._thread.join(timeout)

    def _run(self) -> None:
        started = time.perf_counter()
        directory = CheckpointDirectory(self._work.parent)
        try:
            assert self._snapshot is not None
            trainer = self._snapshot.write(self._work)
            checkpoint = directory.complete(self._work, self._draft.with_trainer(trainer))
            self._published = Published(checkpoint, time.perf_counter() - started)
        except BaseException as error:  # noqa: BLE001 - raised where the outcome is asked for
            directory.abandon(self._work)
            self._failure = error
        finally:
            self._snapshot = None  # as large as the state itself
