"""What of a model is computed once more in the backward pass: the flags' values as Megatron takes them."""

from __future__ import annotations

from typing import Any

from samples.errors import InputError
from train.config.recomputation import RecomputeConfig


def recompute_fields(recompute: RecomputeConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig."""
    if recompute.recompute_granularity is None:
        return {}
    if recompute.recompute_granularity == "selective":
        modules = list(recompute.recompute_modules) or ["core_attn"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.recompute_method or "uniform",
        "recompute_num_layers": recompute.recompute_num_layers or 1,
    }


def check_recompute(hf_config: Any, recompute: RecomputeConfig, stages: int) -> None:
    """Raise InputError naming the flag that does not fit this model, cut into ``stages`` pipeline stages."""
    from train.megatron.models import FAMILIES

    layers = hf_config.num_hidden_layers // stages
    number = recompute.recompute_num_layers
    if number is not None and number > layers:
        raise InputError(
            f"--recompute-num-layers {number}: a pipeline stage has {layers} of the model's layers; use at most that"
        )
    if number is not None and recompute.recompute_method != "block" and layers % number:
        raise InputError(
            f"--recompute-num-layers {number} with --recompute-method uniform does not divide the {layers} layers of a "
            "pipeline stage; use a number that does, or --recompute-method block"
        )
    family = FAMILIES[hf_config.model_type]
    routed = family.experts(hf_config) > 0
    if "moe" in recompute.recompute_modules and not routed:
        raise InputError(f"--recompute-modules moe: this {hf_config.model_type} model has no experts; use mlp")
    if "mlp" in recompute.recompute_modules and routed and not _dense_layers(family.transformer_config(hf_config)):
        raise InputError(
            f"--recompute-modules mlp: every layer of this {hf_config.model_type} model has experts; use moe"
        )


def _dense_layers(architecture: dict[str, Any]) -> bool:
    """Whether a model with experts has layers without, from its Megatron architecture."""
    pattern = architecture.get("moe_layer_freq", 1)
    return pattern > 1 if isinstance(pattern, int) else 0 in pattern
