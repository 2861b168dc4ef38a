"""This rank's place among the trainer's ranks: process group and Megatron's parallel state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from accel.comm.process_groups import init_process_group
from accel.comm.teardown import end_communication
from accel.contract import Accelerator
from samples.errors import InputError
from train.config.run import RunConfig
from train.losses import VocabShard

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank stands. ``reports`` is true on one rank of each data-parallel replica that has the loss: the first
    tensor-parallel rank of the last pipeline stage."""

    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_size: int
    is_last_stage: bool

    @property
    def reports(self) -> bool:
        return self.is_last_stage and self.tensor_rank == 0


def join_ranks(
    config: RunConfig, accelerator: Accelerator, *, rank: int, world_size: int, store_path: str | None
) -> RankPlacement:
    """Begin the trainer's process group and Megatron's groups in it. Collective over all trainer ranks.

    Ranks find each other through the file ``store_path``, so no port is opened for it; one rank alone needs none.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel = config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if world_size % replica:
        raise InputError(
            f"{world_size} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be cut into replicas "
            f"of {replica} (--tensor-model-parallel-size x --pipeline-model-parallel-size); use a multiple of {replica}"
        )
    experts = parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    if world_size % experts:
        raise InputError(
            f"{world_size} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot share the experts "
            f"between {experts} (--expert-model-parallel-size x --pipeline-model-parallel-size); use a multiple of "
            f"{experts}"
        )
    if world_size > 1 and store_path is None:
        raise ValueError(f"a trainer of {world_size} ranks needs a store_path that all of them see")
    store = dist.HashStore() if store_path is None else dist.FileStore(store_path, world_size)
    init_process_group(
        accelerator,
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=COLLECTIVE_TIMEOUT,
        reloadable=parallel.reload_process_groups,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,  # experts are small matrices: ranks share their number, not each one
        create_gloo_process_groups=False,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.job.seed)
    return RankPlacement(
        world_size=world_size,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def leave_ranks(
    accelerator: Accelerator, *, failed: bool = False, update_groups: Sequence[Callable[[], None]] = ()
) -> None:
    """End Megatron's groups and the process group; another trainer can begin in this process. Harmless twice.

    ``failed``: after an error, without waiting for other ranks. ``update_groups`` close what is shared with engines.
    """
    from megatron.core import parallel_state

    end_communication(
        accelerator,
        update_groups=update_groups,
        training_groups=parallel_state.destroy_model_parallel,
        failed=failed,
    )


def vocab_shard(local_vocabulary: int) -> VocabShard:
    """This tensor-parallel rank's columns of logits whose last dimension has ``local_vocabulary`` entries."""
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return VocabShard(0)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return VocabShard(rank * local_vocabulary, parallel_state.get_tensor_model_parallel_group())


def sum_over_ranks(values: torch.Tensor, placement: RankPlacement) -> torch.Tensor:
    """Sum over the data-parallel replicas, the same on every rank of the world; replicas' other ranks add nothing."""
    if placement.world_size == 1:
        return values
    values = values if placement.reports else torch.zeros_like(values)
    dist.all_reduce(values)
    return values


def max_over_ranks(values: torch.Tensor, placement: RankPlacement) -> torch.Tensor:
    """Maximum over all ranks of values that are at least 0; only ranks that report count."""
    if placement.world_size == 1:
        return values
    values = values if placement.reports else torch.zeros_like(values)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
