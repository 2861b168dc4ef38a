"""Qwen3, mixture of experts: RMS norm on each query and key head, softmax routing."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    QK_NORM,
    USED_FIELDS,
    decoder_arguments,
    decoder_config,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.heads import head_geometry
from train.megatron.models.mixture import (
    WITHOUT_EFFECT_OF_ROUTER,
    check_choice,
    mixture_config,
    mixture_shapes,
    mixture_spec,
    mlp_rows,
)
from train.megatron.models.rope import inverse_frequencies, unsupported_rope
from train.megatron.weights.table import WeightTable

MIXTURE_FIELDS = frozenset(
    {
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)


def is_mixture(hf_config: Any, layer: int) -> bool:
    """Every ``decoder_sparse_step``-th layer has experts, but for those that are named as dense."""
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0


def unsupported_mixture(hf_config: Any) -> str | None:
    """Why these layers and experts cannot be used, or None."""
    if hf_config.decoder_sparse_step < 1:
        return f"decoder_sparse_step={hf_config.decoder_sparse_step} has to be at least 1"
    return check_choice(hf_config, renormalised=hf_config.norm_topk_prob)


def transformer_config(hf_config: Any) -> dict[str, Any]:
    mixture = mixture_config(
        hf_config,
        experts=hf_config.num_experts,
        width=hf_config.moe_intermediate_size,
        per_token=hf_config.num_experts_per_tok,
    )
    return decoder_config(hf_config) | {"qk_layernorm": True} | mixture


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(hf_config) | mixture_shapes(
        hf_config.hidden_size, hf_config.num_experts, hf_config.moe_intermediate_size
    )


FAMILY = ModelFamily(
    model_type="qwen3_moe",
    fields=ConfigFields(
        used=USED_FIELDS | MIXTURE_FIELDS,
        accepts={
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "attention_dropout": (0.0, None),
            "use_sliding_window": (False,),
        },
        checks={"rope_parameters": unsupported_rope},
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER | {"sliding_window"},  # use_sliding_window turns it on
        together=unsupported_mixture,
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *ATTENTION, *QK_NORM, *NORMS, *mlp_rows(is_mixture), FINAL_NORM, HEAD),
        experts=lambda hf_config: hf_config.num_experts,
    ),
    transformer_config=transformer_config,
    gpt_model=decoder_arguments,
    layer_spec=mixture_spec(is_mixture),
    inverse_frequencies=inverse_frequencies,
    heads=head_geometry,
    shapes=shapes,
)
