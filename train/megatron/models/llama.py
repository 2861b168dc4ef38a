"""Llama 2 and 3 (and models published under ``model_type: llama``)."""

from __future__ import annotations

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS_AND_MLP,
    USED_FIELDS,
    decoder_config,
    decoder_spec,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.rope import unsupported_rope
from train.megatron.weights.table import WeightTable

FAMILY = ModelFamily(
    model_type="llama",
    fields=ConfigFields(
        used=USED_FIELDS,
        accepts=ACCEPTED
        | {
            "attention_bias": (False,),
            "mlp_bias": (False,),
        },
        checks={"rope_parameters": unsupported_rope},
        without_effect=WITHOUT_EFFECT | {"pretraining_tp"},  # how Meta's own training was sharded
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *ATTENTION, *NORMS_AND_MLP, FINAL_NORM, HEAD),
        ignored=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),  # Llama 2 checkpoints store the frequencies
    ),
    transformer_config=decoder_config,
    layer_spec=decoder_spec,
    shapes=tensor_shapes,
)
