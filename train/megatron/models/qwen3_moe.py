"""Qwen3, mixture of experts: RMS norm on each query and key head, softmax routing."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    QK_NORM,
    USED_FIELDS,
    decoder_config,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.mixture import (
    WITHOUT_EFFECT_OF_ROUTER,
    ExpertFields,
    check_choice,
    mixture_config,
    mixture_shapes,
    mixture_spec,
    mlp_rows,
)
from train.megatron.models.rope import unsupported_rope
from train.megatron.weights.table import WeightTable

EXPERTS = ExpertFields()
MIXTURE_FIELDS = EXPERTS.names | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}


def is_mixture(hf_config: Any, layer: int) -> bool:
    """Every ``decoder_sparse_step``-th layer has experts, but for those that are named as dense."""
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0


def unsupported_mixture(hf_config: Any) -> str | None:
    """Why these layers and experts cannot be used, or None."""
    if hf_config.decoder_sparse_step < 1:
        return f"decoder_sparse_step={hf_config.decoder_sparse_step} has to be at least 1"
    return check_choice(hf_config, EXPERTS, renormalised=hf_config.norm_topk_prob)


def transformer_config(hf_config: Any) -> dict[str, Any]:
    mixture = mixture_config(hf_config, EXPERTS)
    return decoder_config(hf_config) | {"qk_layernorm": True} | mixture


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(hf_config) | mixture_shapes(hf_config, EXPERTS)


FAMILY = ModelFamily(
    model_type="qwen3_moe",
    fields=ConfigFields(
        used=USED_FIELDS | MIXTURE_FIELDS,
        accepts=ACCEPTED
        | {
            "attention_bias": (False,),
            "use_sliding_window": (False,),
        },
        checks={"rope_parameters": unsupported_rope},
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER | {"sliding_window"},  # use_sliding_window turns it on
        together=unsupported_mixture,
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *ATTENTION, *QK_NORM, *NORMS, *mlp_rows(is_mixture), FINAL_NORM, HEAD),
        experts=EXPERTS.count,
    ),
    transformer_config=transformer_config,
    layer_spec=mixture_spec(is_mixture),
    shapes=shapes,
)
