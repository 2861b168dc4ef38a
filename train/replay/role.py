"""``--load-debug-rollout-data``: recorded rollouts in the place of a rollout worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from observability.transcripts import pick_transcripts
from samples.errors import InputError
from train.batch import TrainBatch, batch_from_groups
from train.checkpoint.model_facts import model_difference, model_facts
from train.config.run import RunConfig
from train.loop import StepOutput
from train.replay.rollout_file import RolloutHeader, read_header, read_rollout, recorded_ids, rollout_path

_LOAD = "--load-debug-rollout-data"
# Without these the recorded log-probabilities mean something else.
_SAMPLING = ("rollout_temperature", "rollout_top_p", "rollout_top_k")
# What else decides the numbers of training: sections, or single fields of them.
_DECIDING: dict[str, tuple[str, ...] | None] = {
    "job": ("seed", "num_rollout", "trainer_threads", "actor_num_nodes", "actor_num_gpus_per_node"),
    "model": ("bf16", "ref_load"),
    "reward": ("reward_key",),
    "algorithm": None,
    "optimizer": None,
    "batch": None,
    "parallel": None,
}


class ReplayRole:
    """Hands the rollouts of a recording to training. Raises InputError for one that does not fit this run."""

    def __init__(self, config: RunConfig) -> None:
        assert config.debug.load_debug_rollout_data is not None
        assert config.model.hf_checkpoint is not None
        self._config = config
        self._directory = Path(config.debug.load_debug_rollout_data)
        self._model = model_facts(config.model.hf_checkpoint)

    def rollout(self, rollout_id: int) -> tuple[TrainBatch | None, StepOutput]:
        """As ``RolloutRole.rollout``; the metrics are the recorded ones, but for times."""
        started = time.perf_counter()
        path = rollout_path(self._directory, rollout_id)
        header, groups = read_rollout(path)
        self.check(path, header, rollout_id)
        batch = batch_from_groups(groups, self._config) if groups else None
        metrics = {key: value for key, value in header.metrics.items() if not key.startswith("perf/")}
        metrics["perf/rollout_time"] = time.perf_counter() - started
        count = self._config.tracking.transcripts_per_step
        return batch, StepOutput(metrics, pick_transcripts(groups, count, self._config.reward.reward_key))

    def close(self) -> None: ...  # nothing is held open

    def check(self, path: Path, header: RolloutHeader, rollout_id: int) -> None:
        """Refuse a rollout of another model, of another way to sample, or of another number."""
        difference = model_difference(header.model, self._model)
        if difference is not None:
            raise InputError(
                f"{_LOAD}: {path} was recorded with another model, {header.config['model']['hf_checkpoint']}, than "
                f"--hf-checkpoint {self._config.model.hf_checkpoint}: {difference}; give the model that the recorded "
                "run began with"
            )
        for name in _SAMPLING:
            recorded, ours = header.config["rollout"][name], getattr(self._config.rollout, name)
            if recorded != ours:
                flag = "--" + name.replace("_", "-")
                raise InputError(
                    f"{flag} {ours}: {path} was recorded with {recorded}, on which its log-probabilities depend; give "
                    f"{flag} {recorded}"
                )
        if header.rollout_id != rollout_id:
            raise InputError(f"{_LOAD}: {path} holds rollout {header.rollout_id}; its name was changed")


def check_recording(config: RunConfig, first_rollout: int = 0) -> tuple[int, dict[str, Any]]:
    """The rollout before which a replay from ``first_rollout`` on ends, and facts about it. InputError: there is none.

    A recording that is shorter than ``--num-rollout`` is replayed to its end, under the learning rates of the whole.
    """
    role = ReplayRole(config)
    directory = Path(str(config.debug.load_debug_rollout_data))
    ids = recorded_ids(directory)
    if not ids or ids[-1] < first_rollout:
        raise InputError(
            f"{_LOAD} {directory}: holds no {rollout_path(directory, first_rollout).name} and so on; record with "
            "--save-debug-rollout-data"
        )
    wanted = range(first_rollout, min(ids[-1] + 1, config.job.num_rollout))
    missing = sorted(set(wanted) - set(ids))
    if missing:
        raise InputError(
            f"{_LOAD} {directory}: {rollout_path(directory, missing[0]).name} is missing, and without it training is "
            f"another from there on; a replay needs every rollout from {first_rollout} on"
        )
    path = rollout_path(directory, first_rollout)
    header = read_header(path)
    role.check(path, header, first_rollout)
    facts = {"replays": f"{len(wanted)} rollouts of {directory}"}
    changed = changed_settings(header.config, config)
    if changed:
        facts["changed since"] = ", ".join(changed)
    return wanted.stop, facts


def changed_settings(recorded: dict[str, Any], config: RunConfig) -> list[str]:
    """Settings of training that are not those of the recorded run: ``--lr 0.001 -> 0.0005``."""
    ours = config.model_dump(mode="json")
    changed = []
    for section, names in _DECIDING.items():
        for name in names or ours[section]:
            before, now = recorded[section].get(name), ours[section][name]
            if before != now:
                changed.append(f"--{name.replace('_', '-')} {before} -> {now}")
    return changed
