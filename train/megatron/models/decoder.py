"""What pre-norm decoders with grouped-query attention and a gated MLP (Llama and its kin) have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from train.megatron.models.heads import head_dim
from train.megatron.models.rope import rotary_dim, rotary_scale
from train.megatron.weights.table import COLUMN, ROW, LayerChoice, WeightEntry
from train.megatron.weights.transforms import MERGE_GATE_UP, MERGE_QKV

USED_FIELDS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
    }
)

# What every such decoder takes of its activation and of dropout.
ACCEPTED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0, None)}

# The three decide layer_types, which is what a forward pass reads.
DECIDE_LAYER_TYPES = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})

SLIDING, GLOBAL = "sliding_attention", "full_attention"

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

EMBEDDING = WeightEntry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), split=COLUMN, vocab=True)
NORMS = (
    WeightEntry(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",)),
    WeightEntry(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",)),
)


def dense_mlp(where: LayerChoice | None = None) -> tuple[WeightEntry, ...]:
    """Rows of a gated MLP, in all layers or some."""
    gate_up = (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight")
    return (
        WeightEntry(_M + "mlp.linear_fc1.weight", gate_up, MERGE_GATE_UP, split=COLUMN, where=where),
        WeightEntry(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), split=ROW, where=where),
    )


NORMS_AND_MLP = (*NORMS, *dense_mlp())
ATTENTION = (
    WeightEntry(
        _M + "self_attention.linear_qkv.weight",
        (_H + "self_attn.q_proj.weight", _H + "self_attn.k_proj.weight", _H + "self_attn.v_proj.weight"),
        MERGE_QKV,
        split=COLUMN,
    ),
    WeightEntry(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), split=ROW),
)


def qkv_bias(where: LayerChoice | None = None) -> tuple[WeightEntry, ...]:
    """The row of the biases on query, key and value; ``where`` asks the config whether there are any."""
    names = tuple(f"{_H}self_attn.{part}_proj.bias" for part in "qkv")
    return (WeightEntry(_M + "self_attention.linear_qkv.bias", names, MERGE_QKV, split=COLUMN, where=where),)


QKV_BIAS = qkv_bias()


def qk_norm(where: LayerChoice | None = None) -> tuple[WeightEntry, ...]:
    """Rows of the norms of each query and key head; ``where`` asks the config whether there are any."""
    return (
        WeightEntry(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",), where=where),
        WeightEntry(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",), where=where),
    )


QK_NORM = qk_norm()
FINAL_NORM = WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",))
HEAD = WeightEntry(
    "output_layer.weight", ("lm_head.weight",), split=COLUMN, vocab=True, tied_to="model.embed_tokens.weight"
)

# Norms of what a layer adds to the residual stream (PostNorm).
POST_NORMS = (
    WeightEntry(_M + "self_attn_bda.norm.weight", (_H + "post_self_attn_layernorm.weight",)),
    WeightEntry(_M + "mlp_bda.norm.weight", (_H + "post_mlp_layernorm.weight",)),
)


def tensor_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors that the rows above name, by the name with ``{layer}`` left open."""
    hidden, ffn, dim = hf_config.hidden_size, hf_config.intermediate_size, head_dim(hf_config)
    queries, keys = hf_config.num_attention_heads * dim, hf_config.num_key_value_heads * dim
    vocabulary = (hf_config.vocab_size, hidden)
    attention = _H + "self_attn."
    return {
        "model.embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "model.norm.weight": (hidden,),
        _H + "input_layernorm.weight": (hidden,),
        _H + "post_attention_layernorm.weight": (hidden,),
        _H + "mlp.gate_proj.weight": (ffn, hidden),
        _H + "mlp.up_proj.weight": (ffn, hidden),
        _H + "mlp.down_proj.weight": (hidden, ffn),
        attention + "q_proj.weight": (queries, hidden),
        attention + "k_proj.weight": (keys, hidden),
        attention + "v_proj.weight": (keys, hidden),
        attention + "o_proj.weight": (hidden, queries),
        attention + "q_proj.bias": (queries,),
        attention + "k_proj.bias": (keys,),
        attention + "v_proj.bias": (keys,),
        attention + "q_norm.weight": (dim,),
        attention + "k_norm.weight": (dim,),
    }


def decoder_config(hf_config: Any) -> dict[str, Any]:
    """Architecture of such a decoder as keyword arguments of TransformerConfig."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "ffn_hidden_size": hf_config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_scale": _softmax_scale(hf_config),
    }


def _softmax_scale(hf_config: Any) -> float | None:
    """Queries and keys that a scaled rotary embedding turns as a whole are scaled here; None: 1 / sqrt(head_dim)."""
    scale = rotary_scale(hf_config)
    if scale == 1.0 or rotary_dim(hf_config) < head_dim(hf_config):
        return None
    return scale**2 / math.sqrt(head_dim(hf_config))


def core_attention(hf_config: Any, **params: Any) -> Any:
    """Our attention for a layer spec; a rotary embedding that is partial *and* scaled is scaled in it."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from train.megatron.attention import CausalAttention

    scale = rotary_scale(hf_config)
    if scale != 1.0 and rotary_dim(hf_config) < head_dim(hf_config):
        params["turned_scale"] = (rotary_dim(hf_config), scale**2)
    return ModuleSpec(CausalAttention, params=params)


def decoder_arguments(hf_config: Any) -> dict[str, Any]:
    """Architecture of such a decoder as keyword arguments of GPTModel."""
    return {
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
        "position_embedding_type": "rope",
        "rotary_base": hf_config.rope_parameters["rope_theta"],
        "rotary_percent": hf_config.rope_parameters.get("partial_rotary_factor", 1.0),
    }


def decoder_spec(transformer_config: Any, hf_config: Any) -> Any:
    """Megatron's local layers with our norms and our core attention, for every layer of this pipeline stage."""
    return block_spec(transformer_config, lambda _: layer_spec(transformer_config, hf_config))


def layer_spec(transformer_config: Any, hf_config: Any, *, experts: int | None = None) -> Any:
    """One of Megatron's layers with our norms, activation and core attention; with ``experts``, a mixture.

    Local, or where ``transformer_impl`` says so, of TransformerEngine's linear layers, which have norms inside.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    from train.megatron.activation import SwiGLU
    from train.megatron.norm import RMSNorm

    layer = megatron_layer(transformer_config, experts)
    if not uses_engine(transformer_config):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    elif experts:
        layer.submodules.pre_mlp_layernorm = RMSNorm  # the router is no linear layer of TransformerEngine's
    mlp = layer.submodules.mlp.submodules
    for part in (mlp.experts, mlp.shared_experts) if experts else (layer.submodules.mlp,):
        part.submodules.activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = core_attention(hf_config)
    attention.q_layernorm = attention.k_layernorm = RMSNorm if transformer_config.qk_layernorm else IdentityOp
    return layer


def uses_engine(transformer_config: Any) -> bool:
    """Whether layers are made of TransformerEngine's modules."""
    return bool(transformer_config.transformer_impl == "transformer_engine")


def megatron_layer(transformer_config: Any, experts: int | None, *, latent: bool = False) -> Any:
    """Megatron's own spec of a layer, local or of TransformerEngine's modules."""
    from megatron.core.models.gpt import gpt_layer_specs

    shared = {
        "num_experts": experts,
        "qk_layernorm": transformer_config.qk_layernorm,
        "multi_latent_attention": latent,
    }
    if uses_engine(transformer_config):
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            **shared, moe_grouped_gemm=transformer_config.moe_grouped_gemm
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(**shared, normalization="RMSNorm")


def block_spec(transformer_config: Any, layer: Callable[[int], Any]) -> Any:
    """The decoder's part on this pipeline stage; ``layer(i)`` is the spec of layer i, from 0 over the whole model."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from train.megatron.norm import RMSNorm

    first = get_transformer_layer_offset(transformer_config)
    count = get_num_layers_to_build(transformer_config)
    return TransformerBlockSubmodules(layer_specs=[layer(i) for i in range(first, first + count)], layer_norm=RMSNorm)


def unsupported_kinds(layer_types: Sequence[str] | None) -> str | None:
    """Why these ``layer_types`` cannot be used where layers may slide, or None."""
    others = sorted(set(layer_types or ()) - {SLIDING, GLOBAL})
    return f"{', '.join(others)} is not implemented" if others else None


def unsupported_window(hf_config: Any) -> str | None:
    """Why the sliding layers' window cannot be used, or None."""
    window = hf_config.sliding_window
    if SLIDING in hf_config.layer_types and not (isinstance(window, int) and window >= 1):
        return f"sliding_window={window!r} has to be a number of tokens: some of layer_types are {SLIDING}"
    return None


def no_sliding_layers(layer_types: Sequence[str] | None) -> str | None:
    """Why these ``layer_types`` cannot be used, or None."""
    others = sorted(set(layer_types or ()) - {"full_attention"})
    if others:
        return f"every layer attends to the whole sequence here, {', '.join(others)} is not implemented"
    return None
