"""``--save-debug-rollout-data``: what rollouts hand to training, kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from observability.redact import redacted
from rollout.collectors.output import RolloutOutput
from samples.errors import InputError
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


def check_recording_directory(directory: Path, first_rollout: int = 0) -> None:
    """Refuse a directory with rollouts that a run from ``first_rollout`` on would not write over as the same run."""
    ids = recorded_ids(directory)
    if first_rollout == 0 and ids:
        raise InputError(
            f"--save-debug-rollout-data {directory} already holds recorded rollouts ({ids[0]} to {ids[-1]}); give "
            "another directory"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save-debug-rollout-data {directory} cannot be created: {error.strerror}") from error
