"""What each role of a run does, whichever process it lives in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel.contract import Accelerator, MemoryInfo
from observability.transcripts import pick_transcripts
from rollout.deploy.hosts import Spawner
from rollout.worker import RolloutSettings, RolloutWorker
from train.batch import TrainBatch, batch_from_groups
from train.checkpoint.background import BackgroundSave, Published
from train.checkpoint.generators import restore_generators, seed_generators
from train.checkpoint.manifest import Checkpoint, Manifest, RolloutState, TrainerState
from train.checkpoint.released import SavedTrainer
from train.checkpoint.rollout_state import load_collector_state, save_rollout_state
from train.collection import end_sparing, spare_from_collection
from train.compiler_cache import keep_compiler_cache_private
from train.config.run import RunConfig
from train.loop import StepOutput
from train.profiling import ProfilePlan, Profiler
from train.replay.recorder import RolloutRecorder
from train.weight_sync.factory import server_channel
from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd

if TYPE_CHECKING:
    from train.megatron.memory import Tag

_SAVE_SECONDS = 10.0  # that a run which ends by an error gives a save under way


def rollout_settings(config: RunConfig) -> RolloutSettings:
    """The part of a resolved configuration that the rollout worker needs."""
    assert config.model.hf_checkpoint is not None
    assert config.job.rollout_threads is not None
    return RolloutSettings(
        rollout=config.rollout,
        reward=config.reward,
        evaluation=config.evaluation,
        data=config.data,
        model_dir=Path(config.model.hf_checkpoint),
        seed=config.job.seed,
        threads=config.job.rollout_threads,
        bf16=config.model.bf16,
        trust_remote_code=config.model.trust_remote_code,
        num_rollout=config.job.num_rollout,
        sglang=config.sglang,
        num_gpus=config.rollout_devices,
        num_gpus_per_engine=config.job.rollout_num_gpus_per_engine,
        weight_channel=server_channel(config) or "disk",
        frees_memory=config.offload.offloads_rollout,
    )


class RolloutRole:
    """Collects groups and turns them into a validated training batch."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        resume: Checkpoint | None = None,
        profile: ProfilePlan | None = None,
        spawner: Spawner | None = None,
    ) -> None:
        """``spawner``: where servers run, if not on this machine."""
        keep_compiler_cache_private()
        self._config = config
        self._accelerator = accelerator
        self._device_of = accelerator if spawner is None else None  # the servers' hosts have the devices
        self._resume = resume
        self._profiler = Profiler(profile, accelerator, "rollout")
        if config.job.deterministic:
            accelerator.use_deterministic_algorithms()
        without_trainer = config.debug.debug_rollout_only
        self._worker = RolloutWorker(
            rollout_settings(config), accelerator, load_weights=without_trainer, spawner=spawner
        )
        self.receiving = ReceivingEnd(self._worker, accelerator)
        directory = config.debug.save_debug_rollout_data
        self._recorder = None if directory is None else RolloutRecorder(Path(directory), config)

    def start(self) -> None:
        self._worker.start()
        seed_generators(self._config.job.seed, self._device_of)
        if self._resume is not None:
            self._worker.restore(load_collector_state(self._resume))
            restore_generators(self._resume.manifest.state.rollout.generators, self._device_of)
        spare_from_collection()

    def rollout(self, rollout_id: int) -> tuple[TrainBatch | None, StepOutput]:
        """The batch of one rollout, and what there is to say of it; no batch when nothing is left to train on."""
        with self._profiler.step(rollout_id):
            output = self._worker.collect(rollout_id)
        if self._recorder is not None:
            self._recorder.record(output)
        batch = batch_from_groups(output.groups, self._config) if output.groups else None
        count = self._config.tracking.transcripts_per_step
        transcripts = pick_transcripts(output.sampled, count, self._config.reward.reward_key)
        return batch, StepOutput(output.metrics, transcripts, ended=output.ended)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return self._worker.evaluate(rollout_id)

    def settle(self) -> None:
        """Return once new weights may come."""
        self._worker.settle()

    def release_memory(self, tags: tuple[str, ...]) -> None:
        """Have the engine give memory back, and return once it is free. Raises MemoryNotFreed."""
        self._worker.release_memory(tags, self._config.offload.offload_timeout)

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        self._worker.resume_memory(tags)

    def rest(self) -> None:
        """Hold no memory for weight updates, and none that was freed."""
        self.receiving.rest()
        self._accelerator.empty_cache()

    def memory(self) -> MemoryInfo:
        return self._accelerator.memory_info()

    def save_state(self, directory: Path) -> RolloutState:
        """Where this role stands between two steps, for a checkpoint; finished groups are written to ``directory``."""
        return save_rollout_state(directory, self._worker.state(), self._device_of)

    def close(self) -> None:
        try:
            self.receiving.close()
        finally:
            self._worker.close()
            end_sparing()


class TrainerRole:
    """One trainer rank."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        *,
        rank: int,
        store_path: str | None,
        resume: Checkpoint | SavedTrainer | None = None,
        profile: ProfilePlan | None = None,
    ) -> None:
        from train.megatron.bootstrap import prepare_megatron

        keep_compiler_cache_private()
        assert config.model.hf_checkpoint is not None
        assert config.job.trainer_threads is not None
        torch.set_num_threads(config.job.trainer_threads)
        if config.job.deterministic:
            accelerator.use_deterministic_algorithms()
        prepare_megatron(accelerator)
        from train.megatron.trainer import MegatronTrainer

        self._trainer = MegatronTrainer(
            config,
            accelerator,
            rank=rank,
            world_size=config.actor_world_size,
            store_path=store_path,
            hf_directory=Path(config.model.hf_checkpoint),
            resume=resume,
        )
        self.weights_read = self._trainer.weights_read
        self._accelerator = accelerator
        self.sending = SendingEnd(self._trainer.export_weights, accelerator, rank)
        self._profiler = Profiler(profile, accelerator, "train", rank)
        self._saving: BackgroundSave | None = None
        spare_from_collection()

    def train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        with self._profiler.step(rollout_id):
            return self._trainer.train(batch, rollout_id)

    def release_memory(self, tags: Sequence[Tag]) -> None:
        """Give the device memory of these back, and return once it is free. Raises MemoryNotFreed."""
        self._trainer.release_memory(tags)

    def resume_memory(self, tags: Sequence[Tag]) -> None:
        self._trainer.resume_memory(tags)

    def rest(self) -> None:
        """Hold no memory for weight updates, and none that was freed."""
        self.sending.rest()
        self._accelerator.empty_cache()

    def memory(self) -> MemoryInfo:
        return self._accelerator.memory_info()

    def save_state(self, directory: Path) -> TrainerState:
        """Write weights and optimizer state into ``directory``; rank 0 gets to know the files (collective)."""
        return self._trainer.save_state(directory)

    def begin_save(self, work: Path, draft: Manifest) -> None:
        """Copy the state to host memory (collective); the first rank writes and publishes it while training goes on."""
        snapshot = self._trainer.snapshot_state()
        if snapshot is not None:
            self._saving = BackgroundSave(snapshot, work, draft)

    def saved(self, *, wait: bool) -> Published | None:
        """The checkpoint that ``begin_save`` began, once it is there; CheckpointWriteError or OSError when it will not
        be. On the first rank."""
        assert self._saving is not None
        outcome = self._saving.outcome(wait=wait)
        if outcome is not None:
            self._saving = None
        return outcome

    def save_hf(self, directory: Path) -> None:
        self._trainer.save_hf(directory)

    def close(self) -> None:
        if self._saving is not None:  # the run ends by an error: a save under way may still become one
            self._saving.end(_SAVE_SECONDS)
        self._trainer.close(update_groups=[self.sending.close])
        end_sparing()
