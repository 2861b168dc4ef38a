"""GLM-4.5 and 4.6: dense layers first, then a sigmoid router with a bias, and shared experts."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    USED_FIELDS,
    decoder_config,
    qk_norm,
    qkv_bias,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.mixture import (
    ROUTED_EXPERTS,
    SIGMOID_ROUTER,
    WITHOUT_EFFECT_OF_ROUTER,
    check_dense_first,
    check_sigmoid_mixture,
    dense_first,
    layers_beyond,
    mixture_config,
    mixture_shapes,
    mixture_spec,
    mlp_rows,
    router_bias_row,
    router_groups,
    shared_expert_rows,
    shared_expert_shapes,
    sigmoid_router_config,
)
from train.megatron.models.rope import unsupported_partial_rope
from train.megatron.weights.table import WeightTable

_BIAS = "model.layers.{layer}.mlp.gate.e_score_correction_bias"


def sigmoid_mixture(hf_config: Any) -> dict[str, Any]:
    """Arguments of TransformerConfig for this router and these experts, which DeepSeek-V3 began with."""
    mixture = mixture_config(hf_config, ROUTED_EXPERTS, hf_config.moe_intermediate_size * hf_config.n_shared_experts)
    return mixture | sigmoid_router_config(hf_config.routed_scaling_factor) | router_groups(hf_config)


def sigmoid_mixture_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden, width = hf_config.hidden_size, ROUTED_EXPERTS.width_of(hf_config)
    return (
        mixture_shapes(hf_config, ROUTED_EXPERTS)
        | shared_expert_shapes(hidden, width * hf_config.n_shared_experts, "shared_experts")
        | {_BIAS: (ROUTED_EXPERTS.count(hf_config),)}
    )


def transformer_config(hf_config: Any) -> dict[str, Any]:
    attention = {"add_qkv_bias": hf_config.attention_bias, "qk_layernorm": hf_config.use_qk_norm}
    return decoder_config(hf_config) | attention | sigmoid_mixture(hf_config)


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(hf_config) | sigmoid_mixture_shapes(hf_config)


MIXTURE_FIELDS = ROUTED_EXPERTS.names | {"n_shared_experts", "routed_scaling_factor", "n_group", "topk_group"}

FAMILY = ModelFamily(
    model_type="glm4_moe",
    fields=ConfigFields(
        used=USED_FIELDS | MIXTURE_FIELDS | {"attention_bias", "use_qk_norm", "first_k_dense_replace"},
        accepts=ACCEPTED | {"norm_topk_prob": (True,)} | SIGMOID_ROUTER,
        checks={"rope_parameters": unsupported_partial_rope},
        # layers that predict further tokens are not trained, and not exported
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER | {"num_mtp_layers"},
        together=lambda hf_config: check_dense_first(hf_config) or check_sigmoid_mixture(hf_config),
    ),
    weights=WeightTable(
        entries=(
            EMBEDDING,
            *ATTENTION,
            *qkv_bias(lambda hf_config, _: hf_config.attention_bias),
            *qk_norm(lambda hf_config, _: hf_config.use_qk_norm),
            *NORMS,
            *mlp_rows(dense_first, (router_bias_row(dense_first),), shared_expert_rows(dense_first, "shared_experts")),
            FINAL_NORM,
            HEAD,
        ),
        experts=ROUTED_EXPERTS.count,
        beyond=layers_beyond,
    ),
    transformer_config=transformer_config,
    layer_spec=mixture_spec(dense_first),
    shapes=shapes,
    shared=("num_key_value_heads", "num_attention_heads", "intermediate_size", "moe_intermediate_size"),
)
