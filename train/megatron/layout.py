"""Does a model divide over the ranks that were asked for? Answered from its config, before any worker starts."""

from __future__ import annotations

from typing import Any

from samples.errors import InputError
from train.config.sections import ParallelConfig


def check_layout(hf_config: Any, parallel: ParallelConfig) -> None:
    """Raise InputError naming the flag whose value does not divide this model."""
    from train.megatron.models import FAMILIES

    family = FAMILIES[hf_config.model_type]
    tensor = parallel.tensor_model_parallel_size
    for field, size in family.shared_sizes(hf_config).items():
        if size % tensor:
            raise InputError(f"--tensor-model-parallel-size {tensor} does not divide the model's {field}={size}")
    stages = parallel.pipeline_model_parallel_size
    if hf_config.num_hidden_layers % stages:
        raise InputError(
            f"--pipeline-model-parallel-size {stages} does not divide the model's "
            f"num_hidden_layers={hf_config.num_hidden_layers}"
        )
    if parallel.context_parallel_size > 1:
        raise InputError(
            f"--context-parallel-size {parallel.context_parallel_size}: attention over a shared sequence is not "
            "supported on this layer spec; use 1"
        )
    _check_experts(family.experts(hf_config), hf_config.model_type, parallel)
    if parallel.sequence_parallel and tensor == 1:
        raise InputError(
            "--sequence-parallel shares activations between tensor-parallel ranks; "
            "it needs --tensor-model-parallel-size 2 or more"
        )


def _check_experts(experts: int, model_type: str, parallel: ParallelConfig) -> None:
    share = parallel.expert_model_parallel_size
    if share > 1 and not experts:
        raise InputError(f"--expert-model-parallel-size {share}: this {model_type} model has no experts; use 1")
    if experts % share:
        raise InputError(f"--expert-model-parallel-size {share} does not divide the model's {experts} experts")
    if experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise InputError(
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} for a {model_type} model, which has "
            "experts, needs --sequence-parallel: the ranks route their own part of the tokens"
        )


def padded_vocab_size(hf_config: Any, tensor_parallel_size: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, rounded up so that every rank holds the same number."""
    return -(-hf_config.vocab_size // tensor_parallel_size) * tensor_parallel_size
