"""MiniMax-M2: RMS norm over all query heads and over all key heads at once, a sigmoid router with a bias."""

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
    block_spec,
    decoder_config,
    layer_spec,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.heads import head_dim
from train.megatron.models.mixture import (
    WITHOUT_EFFECT_OF_ROUTER,
    ExpertFields,
    check_choice,
    expert_rows,
    layers_beyond,
    mixture_config,
    mixture_shapes,
    router_bias_row,
    sigmoid_router_config,
)
from train.megatron.models.rope import unsupported_partial_rope
from train.megatron.weights.table import COLUMN, WeightEntry, WeightTable

_BLOCK = "model.layers.{layer}.block_sparse_moe."
_BIAS = _BLOCK + "e_score_correction_bias"
_NAMES = ("w1", "w3", "w2")  # gate, up, down
_ATTENTION = "decoder.layers.{layer}.self_attention."
_SELF_ATTN = "model.layers.{layer}.self_attn."


EXPERTS = ExpertFields(experts="num_local_experts", width="intermediate_size")


def is_mixture(_hf_config: Any, _layer: int) -> bool:
    return True


def transformer_config(hf_config: Any) -> dict[str, Any]:
    mixture = mixture_config(hf_config, EXPERTS)
    # Not qk_layernorm: Megatron sums the gradients of such norms over the ranks, and here each rank has its own part.
    return decoder_config(hf_config) | mixture | sigmoid_router_config()


def spec(config: Any, hf_config: Any) -> Any:
    from train.megatron.norm import KeyHeadsNorm, QueryHeadsNorm

    def layer(_: int) -> Any:
        built = layer_spec(config, hf_config, experts=config.num_moe_experts)
        attention = built.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryHeadsNorm, KeyHeadsNorm
        return built

    return block_spec(config, layer)


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    dim = head_dim(hf_config)
    return (
        tensor_shapes(hf_config)
        | mixture_shapes(hf_config, EXPERTS, _NAMES, _BLOCK)
        | {
            _BIAS: (EXPERTS.count(hf_config),),
            _SELF_ATTN + "q_norm.weight": (hf_config.num_attention_heads * dim,),
            _SELF_ATTN + "k_norm.weight": (hf_config.num_key_value_heads * dim,),
        }
    )


# Published configs say these; transformers goes by no other value, and reads none of them.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0, None),
    "attention_window_size": (None,),
    "sliding_window": (None,),
}


def _no_linear_attention(kinds: Any) -> str | None:
    if not isinstance(kinds, list | None):
        return "it has to be a list with the kind of each layer"
    others = [kind for kind in kinds or () if kind != 1]
    return f"attention of the kind {others[0]!r} is not implemented, only 1 (softmax)" if others else None


FAMILY = ModelFamily(
    model_type="minimax_m2",
    fields=ConfigFields(
        used=USED_FIELDS | EXPERTS.names,
        accepts=ACCEPTED | {"router_jitter_noise": (0.0,)} | PUBLISHED,
        checks={"rope_parameters": unsupported_partial_rope, "attn_type_list": _no_linear_attention},
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER,
        together=lambda hf_config: check_choice(hf_config, EXPERTS),
    ),
    weights=WeightTable(
        entries=(
            EMBEDDING,
            *ATTENTION,
            WeightEntry(_ATTENTION + "q_layernorm.weight", (_SELF_ATTN + "q_norm.weight",), split=COLUMN),
            WeightEntry(_ATTENTION + "k_layernorm.weight", (_SELF_ATTN + "k_norm.weight",), split=COLUMN),
            *NORMS,
            *expert_rows(is_mixture, _NAMES, _BLOCK),
            router_bias_row(is_mixture, _BIAS),
            FINAL_NORM,
            HEAD,
        ),
        experts=EXPERTS.count,
        beyond=layers_beyond,
    ),
    transformer_config=transformer_config,
    layer_spec=spec,
    shapes=shapes,
    shared=("num_key_value_heads", "num_attention_heads"),
)
