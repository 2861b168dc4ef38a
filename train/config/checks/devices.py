"""How many devices train and generate, how they are divided, and which process they are reached from."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engines.choice import choose_engine
from train.config.run import RunConfig
from train.config.sections import JobConfig, ParallelConfig


def device_problems(config: RunConfig) -> Iterator[str]:
    parallel, job = config.parallel, config.job
    if parallel.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: this version trains with tensor, pipeline, "
            "data and expert parallelism; use 1"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size of at least 2; leave it out"
    replica, world = config.model_replica_size, config.actor_world_size
    if world % replica:
        yield (
            f"--actor-num-nodes {job.actor_num_nodes} x --actor-num-gpus-per-node {job.actor_num_gpus_per_node} = "
            f"{world} devices do not hold whole replicas of {replica} (tensor x pipeline x context parallel size); use "
            f"a multiple of {replica}"
        )
    elif world % config.smallest_world_size:
        yield (
            f"{world} training devices cannot share the experts between {parallel.expert_model_parallel_size} "
            f"(--expert-model-parallel-size){_of_each_stage(parallel)}; use a multiple of {config.smallest_world_size}"
        )
    if choose_engine(config.rollout)[0] == "torch":
        yield from _embedded_engine_problems(job)


def _of_each_stage(parallel: ParallelConfig) -> str:
    stages = parallel.pipeline_model_parallel_size
    return f" in each of {stages} stages (--pipeline-model-parallel-size)" if stages > 1 else ""


def _embedded_engine_problems(job: JobConfig) -> Iterator[str]:
    per_engine = job.rollout_num_gpus_per_engine
    if per_engine > 1:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine}: the embedded engine runs on one device; use 1, or "
            "--rollout-engine sglang"
        )
    if job.rollout_num_gpus is not None and job.rollout_num_gpus > 1:
        yield (
            f"--rollout-num-gpus {job.rollout_num_gpus}: there is one embedded engine, on one device; use 1, or "
            "--rollout-engine sglang"
        )


def launcher_problems(config: RunConfig) -> Iterator[str]:
    job = config.job
    if job.launcher != "inline":
        return
    if config.actor_world_size > 1:
        yield f"--launcher inline has one trainer rank, but {config.actor_world_size} are asked for; use --launcher ray"
    if job.ray_address is not None:
        yield f"--ray-address {job.ray_address} needs --launcher ray"
