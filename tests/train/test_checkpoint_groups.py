"""Finished groups in a checkpoint: written and read back as they were, or the save fails loudly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.backends.cpu import CpuAccelerator
from rollout.collectors.base import CollectorState, WaitingGroup
from samples.errors import InputError
from samples.sample import Group, Sample, Status
from tests.train.checkpoint_cases import NO_MODEL
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.manifest import Checkpoint, FileFacts, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.rollout_state import GROUPS_FILE, load_collector_state, save_rollout_state

FACTS = {"mode": "fully-async", "totals": {"drawn": 3}, "attempts": [[7, 1]], "metrics": {"loss": float("nan")}}


def _group(index: int, **metadata: object) -> Group:
    return [
        Sample(
            prompt=[{"role": "user", "content": "2 + 2"}],
            tokens=[1, 2, 3],
            response_length=1,
            rollout_log_probs=[-0.1 / 3],
            loss_mask=[1],
            reward={"score": 1 / 3},
            status=Status.TRUNCATED,
            index=2 * index + place,
            group_index=index,
            weight_version=4,
            metadata=dict(metadata),
        )
        for place in range(2)
    ]


def _save(directory: Path, state: CollectorState) -> RolloutState:
    return save_rollout_state(directory, state, CpuAccelerator())


def _checkpoint(directory: Path, rollout: RolloutState) -> Checkpoint:
    trainer = TrainerState(files={"model.safetensors": FileFacts(bytes=1, crc32=0)}, optimizer_steps=5)
    state = RunState(weight_version=5, trainer=trainer, rollout=rollout)
    manifest = Manifest(step=4, run_id="run", written="", learning_rate=0.1, model=NO_MODEL, config={}, state=state)
    return Checkpoint(directory, Manifest.model_validate_json(manifest.model_dump_json()))


def test_finished_groups_come_back_as_they_were(tmp_path: Path):
    fanned_out = [_group(8), _group(9)]
    waiting = [WaitingGroup(_group(7, seen=[1, 2]), 4, _group(7)[0]), WaitingGroup(fanned_out, 3, _group(8)[0])]
    rollout = _save(tmp_path, CollectorState({"position": 12}, FACTS, waiting))
    checkpoint = _checkpoint(tmp_path, rollout)
    assert GROUPS_FILE in checkpoint.manifest.files  # so its size and checksum are checked before a run goes on
    loaded = load_collector_state(checkpoint)
    assert loaded.source == {"position": 12}
    assert loaded.waiting == waiting
    assert repr(loaded.facts) == repr(FACTS)  # a nan is a nan


def test_a_run_in_turn_leaves_no_file_of_groups(tmp_path: Path):
    rollout = _save(tmp_path, CollectorState({"position": 12}, {"mode": "sync"}))
    assert not any(tmp_path.iterdir())
    assert load_collector_state(_checkpoint(tmp_path, rollout)) == CollectorState({"position": 12}, {})


def test_arrays_that_hooks_left_are_saved_as_lists(tmp_path: Path):
    waiting = [WaitingGroup(_group(7, scores=np.array([0.5, 1.5])), 4, _group(7)[0])]
    rollout = _save(tmp_path, CollectorState({}, FACTS, waiting))
    loaded = load_collector_state(_checkpoint(tmp_path, rollout))
    assert loaded.waiting[0].group[0].metadata == {"scores": [0.5, 1.5]}


def test_a_sample_that_json_cannot_hold_fails_the_save_and_is_named(tmp_path: Path):
    waiting = [WaitingGroup(_group(7, lock=object()), 4, _group(7)[0])]
    with pytest.raises(CheckpointWriteError, match=r"group 7 holds what JSON cannot .*metadata"):
        _save(tmp_path, CollectorState({}, FACTS, waiting))


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path):
    rollout = _save(tmp_path, CollectorState({}, FACTS, [WaitingGroup(_group(7), 4, _group(7)[0])]))
    (tmp_path / GROUPS_FILE).write_text('{"mode": "fully-async"}\n{"version": 1}\n')
    with pytest.raises(InputError, match=rf"{GROUPS_FILE} cannot be read"):
        load_collector_state(_checkpoint(tmp_path, rollout))


def test_a_manifest_that_names_groups_outside_its_directory_is_refused():
    facts = FileFacts(bytes=1, crc32=0)
    with pytest.raises(ValueError, match="is not the name of a file in the checkpoint"):
        RolloutState(source={}, generators={}, files={"../groups.jsonl": facts})


def test_what_an_unfinished_response_holds_is_saved_as_plainly_as_a_finished_one(tmp_path: Path):
    def source(value: object) -> dict[str, object]:
        return {"waiting": [{"samples": [_group(7, seen=value)[0].to_dict()]}]}

    rollout = _save(tmp_path, CollectorState(source(np.array([1, 2])), {"mode": "sync"}))
    assert _checkpoint(tmp_path, rollout).manifest.state.rollout.source == source([1, 2])
    with pytest.raises(CheckpointWriteError, match=r"unfinished response .* holds what JSON cannot"):
        _save(tmp_path, CollectorState(source(object()), {"mode": "sync"}))
