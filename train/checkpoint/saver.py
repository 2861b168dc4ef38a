"""When a run saves, and what it does about a save that fails: go on, loudly, except when it is the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from observability.redact import redacted
from samples.errors import RunError
from train.checkpoint.background import Published
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

    def begin_save(self, work: Path, draft: Callable[[RunState], Manifest]) -> None:
        """The same from a copy, while the run goes on; publishes the checkpoint that ``work`` becomes."""
        ...

    def saved(self, *, wait: bool) -> Published | None:
        """What became of it: None while it is being written."""
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
    next one is tried when it is due. With ``--async-save`` only the last save of a run is made so; the others are
    written while it goes on, and one that fails ends the run at the next step.
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
        self._async = identity.config.checkpoint.async_save
        self._pending: int | None = None  # the step that is being written while the run goes on
        self._last_saved = resumed_from
        self._last_step = resumed_from
        self.failed = False  # whether the latest save did

    def after_step(self, rollout_id: int) -> None:
        """Save if it is time to. Nothing of the next step may have begun."""
        self._last_step = rollout_id
        self._collect(wait=False)
        interval = self._identity.config.checkpoint.save_interval
        if interval is None or (rollout_id + 1) % interval != 0:
            return
        if self._async:
            self._begin(rollout_id)
        else:
            self._save(rollout_id, "training goes on, and the next save is tried when it is due")

    def finish(self) -> None:
        """Save the last step that was made, unless it is saved; what is being written is waited for."""
        try:
            self._collect(wait=True)
        except RunError as error:
            self.failed = True
            self._note(f"WARNING: {error}")
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
        self._note(f"saved {checkpoint} in {time.perf_counter() - started:.1f} s")
        self._is_there(step)

    def _begin(self, step: int) -> None:
        """Copy the state; it is written while the next steps are made. RunError when that cannot begin."""
        self._collect(wait=True)  # one at a time: each holds a copy of all of the state
        started = time.perf_counter()
        try:
            work = self._directory.begin(step)
            try:
                self._runtime.begin_save(work.absolute(), lambda state: self._manifest(step, state))
            except BaseException:
                self._directory.abandon(work)
                raise
        except (OSError, CheckpointWriteError) as error:
            raise self._lost(step, error) from error
        self._pending = step
        self._note(f"step {step + 1} is being saved; training waited {time.perf_counter() - started:.1f} s for a copy")

    def _collect(self, *, wait: bool) -> None:
        """Take note of a save that has ended. RunError when it failed: steps would be lost to a later resume unseen."""
        step = self._pending
        if step is None:
            return
        try:
            published = self._runtime.saved(wait=wait)
        except (OSError, CheckpointWriteError) as error:
            self._pending = None
            raise self._lost(step, error) from error
        if published is not None:
            self._pending = None
            self._note(f"saved {published.checkpoint}, written in {published.seconds:.1f} s")
            self._is_there(step)

    def _lost(self, step: int, error: Exception) -> RunError:
        return RunError(
            f"--async-save: no checkpoint of step {step + 1} in {self._directory.path}: {_why(error)}. The newest "
            f"whole one is {self._newest()}; make room or give another --save, and go on from it with --load"
        )

    def _is_there(self, step: int) -> None:
        self.failed = False
        self._last_saved = step
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
