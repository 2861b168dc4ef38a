"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    DECIDE_LAYER_TYPES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS_AND_MLP,
    QKV_BIAS,
    USED_FIELDS,
    decoder_config,
    decoder_spec,
    no_sliding_layers,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.rope import unsupported_rope
from train.megatron.weights.table import WeightTable


def transformer_config(hf_config: Any) -> dict[str, Any]:
    return decoder_config(hf_config) | {"add_qkv_bias": True}


FAMILY = ModelFamily(
    model_type="qwen2",
    fields=ConfigFields(
        used=USED_FIELDS,
        accepts=ACCEPTED,
        checks={"rope_parameters": unsupported_rope, "layer_types": no_sliding_layers},
        without_effect=WITHOUT_EFFECT | DECIDE_LAYER_TYPES,
    ),
    weights=WeightTable(entries=(EMBEDDING, *ATTENTION, *QKV_BIAS, *NORMS_AND_MLP, FINAL_NORM, HEAD)),
    transformer_config=transformer_config,
    layer_spec=decoder_spec,
    shapes=tensor_shapes,
)
