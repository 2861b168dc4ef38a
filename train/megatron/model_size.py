"""How large a model is, by part and by rank, told from its config and weight table: nothing is built or read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from train.config.sections import ParallelConfig
from train.megatron.layout import check_layout, padded_vocab_size
from train.megatron.models.family import ModelFamily
from train.megatron.weights.table import PlacedWeight

GIB = 2**30


@dataclass(frozen=True)
class SizedWeight:
    """One parameter (or saved buffer) of the model, and its number of elements over all ranks."""

    placed: PlacedWeight
    elements: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes that training keeps on the fullest rank. Activations come on top: they go with the batch."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def sized_weights(family: ModelFamily, hf_config: Any) -> Iterator[SizedWeight]:
    """Every parameter of a model; a tied head, which has none of its own, is left out."""
    shapes = family.shapes(hf_config)
    for placed in family.weights.place(hf_config).values():
        if placed.tied:
            continue
        elements = 0
        for name, pattern in zip(placed.hf, placed.patterns, strict=True):
            shape = shapes.get(name) or shapes[pattern]
            elements += math.prod(shape[1:] if placed.stack is not None else shape)
        yield SizedWeight(placed, elements)


def part_of(placed: PlacedWeight) -> str:
    """Which part of a model a parameter belongs to, as a reader would say."""
    name = placed.entry.megatron
    if placed.entry.buffer:
        return "saved buffers (not trained)"
    for fragment, part in (
        ("embedding.", "embedding"),
        ("output_layer.", "head"),
        ("norm", "norms"),
        ("self_attention.", "attention"),
        ("local_experts.", "experts"),
        ("shared_experts.", "shared experts"),
        ("router.", "routers"),
    ):
        if fragment in name:
            return part
    return "dense MLPs"


def parameters_by_part(family: ModelFamily, hf_config: Any) -> dict[str, int]:
    """Elements of each part, in the order in which a token goes through them."""
    parts: dict[str, int] = {}
    for weight in sized_weights(family, hf_config):
        part = part_of(weight.placed)
        parts[part] = parts.get(part, 0) + weight.elements
    return parts


def active_parameters(family: ModelFamily, hf_config: Any) -> int:
    """Parameters that one token goes through: of the experts, those that it is routed to."""
    parts = parameters_by_part(family, hf_config)
    trained = sum(elements for part, elements in parts.items() if "buffers" not in part)
    experts = family.experts(hf_config)
    if not experts:
        return trained
    chosen = int(family.transformer_config(hf_config)["moe_router_topk"])
    return trained - parts["experts"] * (experts - chosen) // experts


def rank_memory(
    family: ModelFamily, hf_config: Any, parallel: ParallelConfig, *, data_parallel_size: int, bf16: bool
) -> RankMemory:
    """What the fullest rank keeps under this layout. ``data_parallel_size``: replicas of the dense part.

    Raises InputError where the layout does not divide the model.
    """
    check_layout(hf_config, parallel)
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    share = parallel.expert_model_parallel_size
    per_stage = hf_config.num_hidden_layers // stages
    dense, experts = [0] * stages, [0] * stages
    pad = padded_vocab_size(hf_config, tensor) / hf_config.vocab_size
    for weight in sized_weights(family, hf_config):
        placed, elements = weight.placed, weight.elements
        last = placed.entry.megatron.startswith(("output_layer", "decoder.final"))
        stage = placed.layer // per_stage if placed.layer is not None else (stages - 1 if last else 0)
        if placed.entry.per_expert:
            experts[stage] += elements // share
            continue
        held = elements * (pad if placed.entry.vocab else 1) / (tensor if placed.entry.split is not None else 1)
        dense[stage] += math.ceil(held)
        if placed.entry.vocab and hf_config.tie_word_embeddings and stages > 1:
            dense[-1] += math.ceil(held)  # the tied head's copy
    expert_replicas = max(data_parallel_size * tensor // share, 1)
    weight_bytes, state_bytes = (2, 12) if bf16 else (4, 8)  # bf16 keeps an fp32 copy beside both moments
    fullest = max(range(stages), key=lambda i: dense[i] + experts[i])
    elements = dense[fullest] + experts[fullest]
    states = dense[fullest] / data_parallel_size + experts[fullest] / expert_replicas
    return RankMemory(
        weights=elements * weight_bytes,
        gradients=elements * 4,
        optimizer=math.ceil(states * state_bytes),
    )
