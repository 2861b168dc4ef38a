"""GLM-4 (0414): rotary embedding of neighbouring pairs in a part of each head, norms before and after each block."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    POST_NORMS,
    USED_FIELDS,
    block_spec,
    decoder_config,
    layer_spec,
    qkv_bias,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.rope import unsupported_partial_rope
from train.megatron.weights.table import COLUMN, ROW, WeightEntry, WeightTable
from train.megatron.weights.transforms import MERGE_GATE_UP

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

MLP = (
    WeightEntry(_M + "mlp.linear_fc1.weight", (_H + "mlp.gate_up_proj.weight",), MERGE_GATE_UP, COLUMN, fused=True),
    WeightEntry(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), split=ROW),
)


def transformer_config(hf_config: Any) -> dict[str, Any]:
    return decoder_config(hf_config) | {
        "add_qkv_bias": hf_config.attention_bias,
        "rotary_interleaved": True,
        "apply_rope_fusion": False,  # Megatron passes no interleaving on to a fused kernel for packed sequences
    }


def spec(config: Any, hf_config: Any) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from train.megatron.norm import PostNorm

    def layer(_: int) -> Any:
        built = layer_spec(config, hf_config)
        built.submodules.self_attn_bda = built.submodules.mlp_bda = ModuleSpec(PostNorm, params={"config": config})
        return built

    return block_spec(config, layer)


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden = hf_config.hidden_size
    return tensor_shapes(hf_config) | {
        _H + "mlp.gate_up_proj.weight": (2 * hf_config.intermediate_size, hidden),
        _H + "post_self_attn_layernorm.weight": (hidden,),
        _H + "post_mlp_layernorm.weight": (hidden,),
    }


FAMILY = ModelFamily(
    model_type="glm4",
    fields=ConfigFields(
        used=USED_FIELDS | {"attention_bias"},
        accepts=ACCEPTED,
        checks={"rope_parameters": unsupported_partial_rope},
        without_effect=WITHOUT_EFFECT,
    ),
    weights=WeightTable(
        entries=(
            EMBEDDING,
            *ATTENTION,
            *qkv_bias(lambda hf_config, _: hf_config.attention_bias),
            *NORMS,
            *POST_NORMS,
            *MLP,
            FINAL_NORM,
            HEAD,
        )
    ),
    transformer_config=transformer_config,
    layer_spec=spec,
    shapes=shapes,
)
