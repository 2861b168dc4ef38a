"""A run's whole configuration: one section per concern, one flat set of flag names."""

from __future__ import annotations

from rollout.config import RewardConfig, RolloutConfig
from samples.config import DataConfig
from train.config.sections import (
    AlgorithmConfig,
    BatchConfig,
    JobConfig,
    ModelConfig,
    OptimizerSection,
    OutputConfig,
    ParallelConfig,
    Section,
)


class RunConfig(Section):
    """Everything that decides what a run does; a section's field ``rollout_top_p`` is the flag ``--rollout-top-p``."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    output: OutputConfig = OutputConfig()

    @property
    def actor_world_size(self) -> int:
        """Ranks that train: nodes x devices per node."""
        p = self.parallel
        replica = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        return self.job.actor_num_nodes * (self.job.actor_num_gpus_per_node or replica)
