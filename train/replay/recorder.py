"""``--save-debug-rollout-data``: what rollouts hand to training, kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from observability import Progress
from observability.redact import redacted
from rollout.collectors.output import RolloutOutput
from samples.errors import InputError
from train.checkpoint.manifest import Checkpoint
from train.checkpoint.model_facts import model_facts
from train.config.run import RunConfig
from train.replay.rollout_file import RolloutHeader, recorded_ids, rollout_path, write_rollout


class RolloutRecorder:
    """Writes a file a rollout into a directory, with all that a replay has to compare itself with."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        assert config.model.hf_checkpoint is not None
        self._directory = directory
        self._model = model_facts(config.model.hf_checkpoint)
        self._config: dict[str, Any] = redacted(config.model_dump(mode="json"))  # recordings get passed on
        directory.mkdir(parents=True, exist_ok=True)

    def record(self, output: RolloutOutput) -> None:
        header = RolloutHeader(
            rollout_id=output.rollout_id,
            group_sizes=[len(group) for group in output.groups],
            model=self._model,
            config=self._config,
            metrics=output.metrics,
        )
        write_rollout(rollout_path(self._directory, output.rollout_id), header, output.groups)


def check_recording_directory(directory: Path, first_rollout: int = 0, *, begins_again: bool = False) -> None:
    """Refuse a directory with rollouts that a run from ``first_rollout`` on would not write over as the same run.

    Those of a run that ``begins_again``, as it ended before its first save, are put aside by ``take_up_recordings``.
    """
    ids = recorded_ids(directory)
    if first_rollout == 0 and ids and not begins_again:
        raise InputError(
            f"--save-debug-rollout-data {directory} already holds recorded rollouts ({ids[0]} to {ids[-1]}); give "
            "another directory"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=".accelrl-", dir=directory))  # only an attempt tells
    except OSError as error:
        raise InputError(
            f"--save-debug-rollout-data {directory} cannot be written ({error.strerror}); give a writable place"
        ) from error


def take_up_recordings(config: RunConfig, resume: Checkpoint | None, progress: Progress) -> None:
    """Put aside what a run recorded that saved no checkpoint and begins again: its rollouts are made anew."""
    if config.debug.save_debug_rollout_data is None or resume is not None:
        return
    directory = Path(config.debug.save_debug_rollout_data)
    ids = recorded_ids(directory)
    if not ids:
        return
    number, aside = 1, directory / "before"
    while aside.exists():
        number += 1
        aside = directory / f"before-{number}"
    aside.mkdir()
    for rollout in ids:
        path = rollout_path(directory, rollout)
        path.rename(aside / path.name)
    progress.note(f"the rollouts of a run that saved no checkpoint are now in {aside}")
