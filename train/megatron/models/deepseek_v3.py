"""DeepSeek-V3 (and Kimi-K2, of its shape): latent attention, dense layers first, then shared and routed experts.

Latent attention is Megatron's. Its compressing projections are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    block_spec,
    decoder_config,
    tensor_shapes,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.glm4_moe import MIXTURE_FIELDS, sigmoid_mixture, sigmoid_mixture_shapes
from train.megatron.models.mixture import (
    ROUTED_EXPERTS,
    SIGMOID_ROUTER,
    WITHOUT_EFFECT_OF_ROUTER,
    check_dense_first,
    check_sigmoid_mixture,
    dense_first,
    layers_beyond,
    mlp_rows,
    router_bias_row,
    shared_expert_rows,
)
from train.megatron.models.rope import unsupported_latent_rope
from train.megatron.weights.table import COLUMN, ROW, LayerChoice, WeightEntry, WeightTable

_M = "decoder.layers.{layer}.self_attention."
_H = "model.layers.{layer}.self_attn."

LATENT_FIELDS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads"}
)


def _compresses_queries(hf_config: Any, _layer: int) -> bool:
    return hf_config.q_lora_rank is not None


LATENT_ATTENTION = (
    WeightEntry(
        _M + "linear_q_proj.weight",
        (_H + "q_proj.weight",),
        split=COLUMN,
        where=lambda hf_config, _: hf_config.q_lora_rank is None,
    ),
    WeightEntry(_M + "linear_q_down_proj.weight", (_H + "q_a_proj.weight",), where=_compresses_queries),
    WeightEntry(_M + "q_layernorm.weight", (_H + "q_a_layernorm.weight",), where=_compresses_queries),
    WeightEntry(_M + "linear_q_up_proj.weight", (_H + "q_b_proj.weight",), split=COLUMN, where=_compresses_queries),
    WeightEntry(_M + "linear_kv_down_proj.weight", (_H + "kv_a_proj_with_mqa.weight",)),
    WeightEntry(_M + "kv_layernorm.weight", (_H + "kv_a_layernorm.weight",)),
    WeightEntry(_M + "linear_kv_up_proj.weight", (_H + "kv_b_proj.weight",), split=COLUMN),
    WeightEntry(_M + "linear_proj.weight", (_H + "o_proj.weight",), split=ROW),
)


def latent_attention_config(hf_config: Any) -> dict[str, Any]:
    """Arguments of MLATransformerConfig. Frequencies are set by ``inverse_frequencies`` whatever their scaling."""
    rope = hf_config.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf_config.num_attention_heads,
        "kv_channels": hf_config.v_head_dim,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": rope["rope_theta"],
        # These two make the softmax's scale what transformers' yarn_apply_mscale makes it.
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0) if scaled else 0.0,
        "apply_rope_fusion": False,
    }


def transformer_config(hf_config: Any) -> dict[str, Any]:
    return decoder_config(hf_config) | latent_attention_config(hf_config) | sigmoid_mixture(hf_config)


def gpt_model(hf_config: Any) -> dict[str, Any]:
    """Arguments of GPTModel: each attention layer makes its own rotary embedding."""
    return {
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
        "position_embedding_type": "rope",
    }


def latent_spec(is_mixture: LayerChoice) -> Any:
    """``layer_spec`` of a family with latent attention."""

    def spec(config: Any, hf_config: Any) -> Any:
        from train.megatron.latent_attention import latent_layer

        def layer(i: int) -> Any:
            return latent_layer(config, config.num_moe_experts if is_mixture(hf_config, i) else None)

        return block_spec(config, layer)

    return spec


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
    latent, turned = hf_config.kv_lora_rank, hf_config.qk_rope_head_dim
    query = heads * (hf_config.qk_nope_head_dim + turned)
    attention = {
        "q_proj": (query, hidden),
        "kv_a_proj_with_mqa": (latent + turned, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (hf_config.qk_nope_head_dim + hf_config.v_head_dim), latent),
        "o_proj": (hidden, heads * hf_config.v_head_dim),
    }
    if hf_config.q_lora_rank is not None:
        rank = hf_config.q_lora_rank
        attention |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (query, rank)}
    named = {f"{_H}{name}.weight": shape for name, shape in attention.items()}
    return tensor_shapes(hf_config) | sigmoid_mixture_shapes(hf_config) | named


def _unsupported_latent(hf_config: Any) -> str | None:
    heads, keys = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if keys != heads:
        return f"num_key_value_heads={keys} has to be num_attention_heads={heads}: latent attention makes keys for each"
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"):
        size = getattr(hf_config, name)
        if (size is None and name != "q_lora_rank") or (size is not None and size < 1):
            return f"{name}={size!r} is not a size"
    return check_sigmoid_mixture(hf_config)


def latent_family(
    model_type: str,
    is_mixture: LayerChoice,
    *,
    layer_fields: frozenset[str],
    unsupported_layers: Callable[[Any], str | None] = check_dense_first,
) -> ModelFamily:
    """A family of this shape; ``is_mixture`` goes by ``layer_fields``, which ``unsupported_layers`` checks."""
    return ModelFamily(
        model_type=model_type,
        fields=ConfigFields(
            used=LATENT_FIELDS
            | MIXTURE_FIELDS
            | layer_fields
            | {
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "rms_norm_eps",
                "tie_word_embeddings",
                "num_key_value_heads",
            },
            accepts=ACCEPTED
            | {
                "attention_bias": (False,),
                "norm_topk_prob": (True,),
                "rope_interleave": (True,),
            }
            | SIGMOID_ROUTER,
            checks={"rope_parameters": unsupported_latent_rope},
            without_effect=WITHOUT_EFFECT
            | WITHOUT_EFFECT_OF_ROUTER
            # layers that predict further tokens are not trained
            | {"num_mtp_layers", "pretraining_tp"},
            together=lambda hf_config: _unsupported_latent(hf_config) or unsupported_layers(hf_config),
        ),
        weights=WeightTable(
            entries=(
                EMBEDDING,
                *LATENT_ATTENTION,
                *NORMS,
                *mlp_rows(is_mixture, (router_bias_row(is_mixture),), shared_expert_rows(is_mixture, "shared_experts")),
                FINAL_NORM,
                HEAD,
            ),
            ignored=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),
            experts=ROUTED_EXPERTS.count,
            beyond=layers_beyond,
        ),
        transformer_config=transformer_config,
        gpt_model=gpt_model,
        layer_spec=latent_spec(is_mixture),
        shapes=shapes,
        shared=("num_attention_heads", "intermediate_size", "moe_intermediate_size"),
    )


FAMILY = latent_family("deepseek_v3", dense_first, layer_fields=frozenset({"first_k_dense_replace"}))
