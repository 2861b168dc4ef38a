"""Qwen2, mixture of experts: biases on query, key and value, and a shared expert behind a gate."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    DECIDE_LAYER_TYPES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    USED_FIELDS,
    decoder_config,
    no_sliding_layers,
    qkv_bias,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.mixture import (
    WITHOUT_EFFECT_OF_ROUTER,
    mixture_config,
    mixture_shapes,
    mixture_spec,
    mlp_rows,
    shared_expert_rows,
    shared_expert_shapes,
)
from train.megatron.models.qwen3_moe import EXPERTS, MIXTURE_FIELDS, is_mixture, unsupported_mixture
from train.megatron.models.rope import unsupported_rope
from train.megatron.weights.table import WeightEntry, WeightTable

_GATE = "mlp.shared_expert_gate.weight"


def transformer_config(hf_config: Any) -> dict[str, Any]:
    mixture = mixture_config(hf_config, EXPERTS, hf_config.shared_expert_intermediate_size)
    return decoder_config(hf_config) | {"add_qkv_bias": hf_config.qkv_bias, "moe_shared_expert_gate": True} | mixture


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden = hf_config.hidden_size
    return (
        tensor_shapes(hf_config)
        | mixture_shapes(hf_config, EXPERTS)
        | shared_expert_shapes(hidden, hf_config.shared_expert_intermediate_size, "shared_expert")
        | {f"model.layers.{{layer}}.{_GATE}": (1, hidden)}
    )


SHARED_EXPERT = (
    *shared_expert_rows(is_mixture, "shared_expert"),
    WeightEntry(
        "decoder.layers.{layer}.mlp.shared_experts.gate_weight", (f"model.layers.{{layer}}.{_GATE}",), where=is_mixture
    ),
)


def _unsupported(hf_config: Any) -> str | None:
    if hf_config.num_key_value_heads is None:
        return "num_key_value_heads=None, and transformers has no default for it here"
    if hf_config.shared_expert_intermediate_size < 1:
        return f"shared_expert_intermediate_size={hf_config.shared_expert_intermediate_size} is not a size"
    return unsupported_mixture(hf_config)


FAMILY = ModelFamily(
    model_type="qwen2_moe",
    fields=ConfigFields(
        used=USED_FIELDS | MIXTURE_FIELDS | {"shared_expert_intermediate_size", "qkv_bias"},
        accepts=ACCEPTED,
        checks={"rope_parameters": unsupported_rope, "layer_types": no_sliding_layers},
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER | DECIDE_LAYER_TYPES,
        together=_unsupported,
    ),
    weights=WeightTable(
        entries=(
            EMBEDDING,
            *ATTENTION,
            *qkv_bias(lambda hf_config, _: hf_config.qkv_bias),
            *NORMS,
            *mlp_rows(is_mixture, SHARED_EXPERT),
            FINAL_NORM,
            HEAD,
        ),
        experts=EXPERTS.count,
    ),
    transformer_config=transformer_config,
    layer_spec=mixture_spec(is_mixture),
    shapes=shapes,
    shared=("num_key_value_heads", "num_attention_heads", "intermediate_size", "shared_expert_intermediate_size"),
)
