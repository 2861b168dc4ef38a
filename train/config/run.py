"""A run's whole configuration: one section per concern, one flat set of flag names."""

from __future__ import annotations

import math

from rollout.config import EvalConfig, RewardConfig, RolloutConfig
from rollout.deploy.config import SGLangConfig
from rollout.engines.choice import choose_engine
from samples.config import DataConfig
from train.config.checkpoint import CheckpointConfig
from train.config.offload import OffloadConfig
from train.config.profiling import ProfilingConfig
from train.config.recomputation import RecomputeConfig
from train.config.sections import (
    AlgorithmConfig,
    BatchConfig,
    DebugConfig,
    JobConfig,
    ModelConfig,
    OptimizerSection,
    OutputConfig,
    ParallelConfig,
    Section,
)
from train.config.tracking import TrackingConfig
from train.config.weights import WeightUpdateConfig


class RunConfig(Section):
    """Everything that decides what a run does; a section's field ``rollout_top_p`` is the flag ``--rollout-top-p``."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    sglang: SGLangConfig = SGLangConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvalConfig = EvalConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    weights: WeightUpdateConfig = WeightUpdateConfig()
    offload: OffloadConfig = OffloadConfig()
    output: OutputConfig = OutputConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    debug: DebugConfig = DebugConfig()
    profiling: ProfilingConfig = ProfilingConfig()

    @property
    def model_replica_size(self) -> int:
        """Ranks that hold one copy of the model: tensor x pipeline x context parallel size."""
        p = self.parallel
        return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size

    @property
    def actor_world_size(self) -> int:
        """Ranks that train: nodes x devices per node."""
        return self.job.actor_num_nodes * (self.job.actor_num_gpus_per_node or self.smallest_world_size)

    @property
    def smallest_world_size(self) -> int:
        """Ranks that hold whole copies of the model and all of its experts, which data-parallel ranks share."""
        p = self.parallel
        return math.lcm(self.model_replica_size, p.pipeline_model_parallel_size * p.expert_model_parallel_size)

    @property
    def trainer_ranks(self) -> int:
        """Ranks that this run starts: all that train, or none with ``--debug-rollout-only``."""
        return 0 if self.debug.debug_rollout_only else self.actor_world_size

    @property
    def rollout_devices(self) -> int | None:
        """``--rollout-num-gpus``, or with ``--colocate`` the devices that train (one for the embedded engine)."""
        if not self.offload.colocate or self.job.rollout_num_gpus is not None:
            return self.job.rollout_num_gpus
        return 1 if choose_engine(self.rollout)[0] == "torch" else self.actor_world_size

    @property
    def takes_turns(self) -> bool:
        """Whether training and rollout give their memory back, or share devices, in turn."""
        return self.offload.takes_turns and not (self.debug.replays or self.debug.debug_rollout_only)

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that train, each on its part of a batch."""
        return self.actor_world_size // self.model_replica_size
