"""When a run saves, and what it does about a save that fails: go on, loudly, except when it is the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from observability.redact import redacted
from train.checkpoint.directory import CheckpointDirectory
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.manifest import Manifest, ModelFacts, RunState
from train.config.run import RunConfig
from train.learning_rate import learning_rate


class SavesState(Protocol):
    """Who holds the state of a run between two steps."""

    def save_state(self, directory: Path) -> RunState:
        """Write the trainer's files into ``directory``; raises CheckpointWriteError when that fails."""
        ...


@dataclass(frozen=True)
class RunIdentity:
    """What every checkpoint of a run says of it."""

    run_id: str
    model: ModelFacts
    config: RunConfig


class CheckpointSaver:
    """Saves after every ``--save-interval`` steps, and at the end of the run however it ends.

    A failed save costs a run nothing but the checkpoint: it is reported, the disk is left as it was before, and the
    next one is tried when it is due.
    """

    def __init__(
        self,
        directory: Path,
        identity: RunIdentity,
        runtime: SavesState,
        *,
        note: Callable[[str], None],
        resumed_from: int | None = None,
    ) -> None:
        self._directory = CheckpointDirectory(directory)
        self._identity = identity
        self._runtime = runtime
        self._note = note
        self._last_saved = resumed_from
        self._last_step = resumed_from
        self.failed = False  # whether the latest save did

    def after_step(self, rollout_id: int) -> None:
        """Save if it is time to. Nothing of the next step may have begun."""
        self._last_step = rollout_id
        interval = self._identity.config.checkpoint.save_interval
        if interval is not None and (rollout_id + 1) % interval == 0:
            self._save(rollout_id, "training goes on, and the next save is tried when it is due")

    def finish(self) -> None:
        """Save the last step that was made, unless it is saved."""
        if self._last_step is not None and self._last_step != self._last_saved:
            self._save(self._last_step, "the steps since then are lost to a later --load")

    def _save(self, step: int, consequence: str) -> None:
        started = time.perf_counter()
        try:
            checkpoint = self._write(step)
        except (OSError, CheckpointWriteError) as error:
            self.failed = True
            self._note(
                f"WARNING: no checkpoint of step {step + 1} in {self._directory.path}: {_why(error)}. The newest whole "
                f"one is {self._newest()}; {consequence}"
            )
            return
        self.failed = False
        self._last_saved = step
        self._note(f"saved {checkpoint} in {time.perf_counter() - started:.1f} s")
        keep = self._identity.config.checkpoint.save_keep
        if keep is not None:
            try:
                self._directory.keep(keep)
            except OSError as error:
                self._note(f"WARNING: an old checkpoint in {self._directory.path} was not removed: {_why(error)}")

    def _write(self, step: int) -> Path:
        work = self._directory.begin(step)
        try:
            state = self._runtime.save_state(work.absolute())
            return self._directory.complete(work, self._manifest(step, state))
        except BaseException:
            self._directory.abandon(work)
            raise

    def _manifest(self, step: int, state: RunState) -> Manifest:
        config = self._identity.config
        return Manifest(
            step=step,
            run_id=self._identity.run_id,
            written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            optimizer="adamw" if config.optimizer.optimizer == "adam" else "stateless-adam",
            learning_rate=learning_rate(step, config.optimizer, config.job.num_rollout),
            model=self._identity.model,
            config=redacted(config.model_dump(mode="json")),  # a checkpoint is passed on to others
            state=state,
        )

    def _newest(self) -> str:
        steps = self._directory.steps()
        return self._directory.checkpoint(steps[-1]).name if steps else "none"


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
    return str(error)
