"""Qwen3, dense: RMS norm on each query and key head."""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS_AND_MLP,
    QK_NORM,
    USED_FIELDS,
    decoder_arguments,
    decoder_config,
    decoder_spec,
    no_sliding_layers,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.heads import head_geometry
from train.megatron.models.rope import inverse_frequencies, unsupported_rope
from train.megatron.weights.table import WeightTable


def transformer_config(hf_config: Any) -> dict[str, Any]:
    return decoder_config(hf_config) | {"qk_layernorm": True}


FAMILY = ModelFamily(
    model_type="qwen3",
    fields=ConfigFields(
        used=USED_FIELDS,
        accepts={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "attention_dropout": (0.0, None)},
        checks={"rope_parameters": unsupported_rope, "layer_types": no_sliding_layers},
        # the three decide layer_types, which is what a forward pass reads
        without_effect=WITHOUT_EFFECT | {"use_sliding_window", "sliding_window", "max_window_layers"},
    ),
    weights=WeightTable(entries=(EMBEDDING, *ATTENTION, *QK_NORM, *NORMS_AND_MLP, FINAL_NORM, HEAD)),
    transformer_config=transformer_config,
    gpt_model=decoder_arguments,
    layer_spec=decoder_spec,
    inverse_frequencies=inverse_frequencies,
    heads=head_geometry,
    shapes=tensor_shapes,
)
