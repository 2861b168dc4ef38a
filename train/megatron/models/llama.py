"""Llama 2 and 3 (and models published under ``model_type: llama``)."""

from __future__ import annotations

from train.megatron.models.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS_AND_MLP,
    USED_FIELDS,
    decoder_arguments,
    decoder_config,
    decoder_spec,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.heads import head_geometry
from train.megatron.models.rope import inverse_frequencies, unsupported_rope
from train.megatron.weights.table import WeightTable

FAMILY = ModelFamily(
    model_type="llama",
    fields=ConfigFields(
        used=USED_FIELDS,
        accepts={
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "attention_dropout": (0.0, None),
        },
        checks={"rope_parameters": unsupported_rope},
        without_effect=WITHOUT_EFFECT | {"pretraining_tp"},  # how Meta's own training was sharded
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *ATTENTION, *NORMS_AND_MLP, FINAL_NORM, HEAD),
        ignored=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),  # Llama 2 checkpoints store the frequencies
    ),
    transformer_config=decoder_config,
    gpt_model=decoder_arguments,
    layer_spec=decoder_spec,
    inverse_frequencies=inverse_frequencies,
    heads=head_geometry,
    shapes=tensor_shapes,
)
