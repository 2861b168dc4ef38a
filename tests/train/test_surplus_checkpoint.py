"""What the synchronous collector holds between two steps goes through a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

from accel import select_accelerator
from tests.rollout.test_sync_first_come import setup, slow_groups
from tests.train.checkpoint_cases import NO_MODEL
from train.checkpoint.manifest import Checkpoint, FileFacts, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.rollout_state import load_collector_state, save_rollout_state


def through_a_checkpoint(directory: Path, rollout: RolloutState) -> Checkpoint:
    trainer = TrainerState(files={"model.safetensors": FileFacts(bytes=1, crc32=0)}, optimizer_steps=1)
    run = RunState(weight_version=1, trainer=trainer, rollout=rollout)
    manifest = Manifest(step=0, run_id="", written="", learning_rate=0.0, model=NO_MODEL, config={}, state=run)
    return Checkpoint(directory, Manifest.model_validate_json(manifest.model_dump_json()))


async def test_kept_surplus_is_trained_on_after_a_resume_as_it_would_have_been(tmp_path: Path):
    made = setup(keep_surplus_groups=True)
    await made.collect(0)
    rollout = save_rollout_state(tmp_path, await made.collector.state(), select_accelerator("cpu"))
    resumed = setup(keep_surplus_groups=True)
    resumed.collector.restore(load_collector_state(through_a_checkpoint(tmp_path, rollout)))
    assert await made.collect(1) == await resumed.collect(1) == [2, 3]
    assert made.output.groups == resumed.output.groups


async def test_partial_responses_go_on_after_a_resume_as_they_would_have(tmp_path: Path):
    made = setup(slow_groups(0, 1, by=13), partial_rollout=True)
    await made.collect(0)
    rollout = save_rollout_state(tmp_path, await made.collector.state(), select_accelerator("cpu"))
    resumed = setup(partial_rollout=True)
    resumed.collector.restore(load_collector_state(through_a_checkpoint(tmp_path, rollout)))
    resumed.engine.weight_version = 1
    made.engine._steps = lambda index: 1
    assert await made.collect(1) == await resumed.collect(1) == [0, 1]
    assert made.output.groups == resumed.output.groups
    assert {sample.weight_version for group in resumed.output.groups for sample in group} == {0}
