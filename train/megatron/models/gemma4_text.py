"""Gemma 4, text only: sliding and global layers of different heads, norms around each block, experts beside the MLP.

Not implemented, and refused: embeddings for each layer (E2B, E4B), and layers that share keys and values of others.
"""

from __future__ import annotations

from typing import Any

import torch

from train.megatron.models.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    GLOBAL,
    HEAD,
    SLIDING,
    USED_FIELDS,
    block_spec,
    core_attention,
    layer_spec,
    qk_norm,
    unsupported_kinds,
    unsupported_window,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.mixture import ExpertFields, check_choice, mixture_config
from train.megatron.weights.table import COLUMN, ROW, WeightEntry, WeightTable
from train.megatron.weights.transforms import MERGE_GATE_UP, MERGE_QK, HeadGeometry

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_EXPERT = _M + "mlp.mixture.experts.local_experts.{expert}."


EXPERTS = ExpertFields(per_token="top_k_experts")


def head_sizes(hf_config: Any, layer: int | str) -> tuple[int, int]:
    """Elements of a head, and key/value heads, of a layer or a kind of layer."""
    own = hf_config.per_layer_config[layer]
    return int(own.head_dim), int(own.num_key_value_heads)


def value_is_key(hf_config: Any, layer: int) -> bool:
    return bool(hf_config.attention_k_eq_v) and hf_config.layer_types[layer] == GLOBAL


def heads(hf_config: Any, layer: int | None) -> HeadGeometry:
    if layer is None:
        return HeadGeometry(1, 1)
    dim, groups = head_sizes(hf_config, layer)
    return HeadGeometry(dim, hf_config.num_attention_heads // groups)


def _with_experts(hf_config: Any, _layer: int) -> bool:
    return bool(hf_config.enable_moe_block)


def _dense_only(hf_config: Any, _layer: int) -> bool:
    return not hf_config.enable_moe_block


def _mlp(prefix: str, where: Any) -> tuple[WeightEntry, ...]:
    gate_up = (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight")
    return (
        WeightEntry(prefix + "linear_fc1.weight", gate_up, MERGE_GATE_UP, split=COLUMN, where=where),
        WeightEntry(prefix + "linear_fc2.weight", (_H + "mlp.down_proj.weight",), split=ROW, where=where),
    )


def _norm(megatron: str, hf: str, where: Any = None) -> WeightEntry:
    return WeightEntry(f"{_M}{megatron}.weight", (f"{_H}{hf}.weight",), where=where)


LAYER = (
    WeightEntry(
        ATTENTION[0].megatron,
        ATTENTION[0].hf,
        ATTENTION[0].transform,
        split=COLUMN,
        where=lambda hf_config, layer: not value_is_key(hf_config, layer),
    ),
    WeightEntry(ATTENTION[0].megatron, ATTENTION[0].hf[:2], MERGE_QK, split=COLUMN, where=value_is_key),
    *ATTENTION[1:],
    *qk_norm(),
    _norm("input_layernorm", "input_layernorm"),
    _norm("self_attn_bda.norm", "post_attention_layernorm"),
    _norm("mlp_bda.norm", "post_feedforward_layernorm"),
    WeightEntry(_M + "mlp_bda.layer_scalar", (_H + "layer_scalar",), buffer=True),
    _norm("pre_mlp_layernorm", "pre_feedforward_layernorm", _dense_only),
    *_mlp(_M + "mlp.", _dense_only),
    _norm("mlp.dense_norm", "pre_feedforward_layernorm", _with_experts),
    *_mlp(_M + "mlp.dense.", _with_experts),
    _norm("mlp.dense_post_norm", "post_feedforward_layernorm_1", _with_experts),
    _norm("mlp.mixture.norm", "pre_feedforward_layernorm_2", _with_experts),
    _norm("mlp.experts_post_norm", "post_feedforward_layernorm_2", _with_experts),
    WeightEntry(_M + "mlp.mixture.router.weight", (_H + "router.proj.weight",), where=_with_experts),
    WeightEntry(_M + "mlp.mixture.router.scale", (_H + "router.scale",), where=_with_experts),
    WeightEntry(_M + "mlp.mixture.router.per_expert_scale", (_H + "router.per_expert_scale",), where=_with_experts),
    WeightEntry(_EXPERT + "linear_fc1.weight", (_H + "experts.gate_up_proj",), where=_with_experts),
    WeightEntry(_EXPERT + "linear_fc2.weight", (_H + "experts.down_proj",), where=_with_experts),
)


def transformer_config(hf_config: Any) -> dict[str, Any]:
    dim, groups = head_sizes(hf_config, 0)  # each layer has its own (GemmaAttention)
    built = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": groups,
        "kv_channels": dim,
        "ffn_hidden_size": hf_config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "softmax_scale": 1.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if hf_config.enable_moe_block:
        built |= mixture_config(hf_config, EXPERTS)
    return built


def gpt_model(hf_config: Any) -> dict[str, Any]:
    return {
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
        "position_embedding_type": "rope",
    }


def spec(config: Any, hf_config: Any) -> Any:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from train.megatron.activation import GeGLU
    from train.megatron.gemma import DenseBesideExperts, GemmaAttention, GemmaExperts, GemmaResidual, GemmaRouter
    from train.megatron.norm import PostNorm

    angles = rotary_columns(hf_config)

    def layer(i: int) -> Any:
        kind = hf_config.layer_types[i]
        built = layer_spec(config, hf_config)
        parts = built.submodules
        dim, groups = head_sizes(hf_config, i)
        parts.self_attention.module = GemmaAttention
        parts.self_attention.params = parts.self_attention.params | {
            "head_dim": dim,
            "key_value_heads": groups,
            "value_is_key": value_is_key(hf_config, i),
            "angles": angles[kind],
        }
        parts.self_attention.submodules.core_attention = core_attention(
            hf_config, window=hf_config.sliding_window if kind == SLIDING else None
        )
        parts.self_attn_bda = ModuleSpec(PostNorm, params={"config": config})
        parts.mlp_bda = ModuleSpec(GemmaResidual, params={"config": config})
        parts.mlp.submodules.activation_func = GeGLU
        if config.num_moe_experts:
            mixture = layer_spec(config, hf_config, experts=config.num_moe_experts).submodules.mlp
            mixture.module = GemmaExperts
            mixture.submodules.router = GemmaRouter
            mixture.submodules.experts.submodules.activation_func = GeGLU
            # its norm stands apart, so this is a linear layer without one, as the shared experts' is
            parts.mlp.submodules.linear_fc1 = mixture.submodules.shared_experts.submodules.linear_fc1
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp = ModuleSpec(DenseBesideExperts, submodules=(parts.mlp, mixture))
        return built

    return block_spec(config, layer)


def adapt(model: Any, hf_config: Any) -> None:
    """Scale the embedding and cap the logits: hooks, since Megatron's model has the places but not the functions."""
    from train.megatron.gemma import SoftCap

    if model.pre_process:
        scale = hf_config.hidden_size**0.5

        def scaled(_module: Any, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
            return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)

        model.embedding.register_forward_hook(scaled)
    cap = hf_config.final_logit_softcapping
    if model.post_process and cap is not None:

        def capped(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
            logits, bias = outputs
            return SoftCap.apply(logits, float(cap)), bias

        model.output_layer.register_forward_hook(capped)


def rotary_columns(hf_config: Any) -> dict[str, slice]:
    """Where the pairs of each kind of layer stand in the frequencies of all."""
    columns: dict[str, slice] = {}
    start = 0
    for kind in sorted(set(hf_config.layer_types)):
        pairs = head_sizes(hf_config, kind)[0] // 2
        columns[kind] = slice(start, start + pairs)
        start += pairs
    return columns


def inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """Of the pairs of each kind of layer, one kind after the other; global layers turn the first pairs only."""
    return torch.cat([_frequencies(hf_config, kind) for kind in rotary_columns(hf_config)])


def _frequencies(hf_config: Any, kind: str) -> torch.Tensor:
    rope, dim = hf_config.rope_parameters[kind], head_sizes(hf_config, kind)[0]
    proportional = rope.get("rope_type", "default") == "proportional"
    turned = int(rope.get("partial_rotary_factor", 1.0) * dim // 2) if proportional else dim // 2
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * turned, 2, dtype=torch.int64).float() / dim)
    factor = rope.get("factor", 1.0) if proportional else 1.0
    return torch.cat((frequencies, torch.zeros(dim // 2 - turned))) / factor


def unsupported_rope(parameters: Any) -> str | None:
    """Why these ``rope_parameters``, by kind of layer, cannot be used, or None."""
    for kind, rope in (parameters or {}).items():
        if kind not in (SLIDING, GLOBAL):
            return f"there are no layers of the kind {kind!r}"
        rope = rope or {}
        form = rope.get("rope_type", "default")
        if form not in ("default", "proportional"):
            return f"rope_type {form!r} is not implemented, of default, proportional"
        if form == "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "partial_rotary_factor goes with rope_type 'proportional'"
        for name in ("rope_theta", "factor", "partial_rotary_factor"):
            value = rope.get(name, 1.0 if name != "rope_theta" else None)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e18:
                return f"{name} has to be a number above 0, not {value!r}"
    return None


def _only_larger(asked: int | None, what: str) -> str | None:
    return f"{what} (Gemma 4 E2B and E4B) is not implemented; the larger models have none" if asked else None


def _unsupported(hf_config: Any) -> str | None:
    cap = hf_config.final_logit_softcapping
    if cap is not None and not cap > 0:
        return f"final_logit_softcapping={cap!r} has to be above 0"
    kinds = hf_config.layer_types
    own = [(kind, head_sizes(hf_config, layer)) for layer, kind in enumerate(kinds)]
    for kind, (dim, groups) in own:
        if kind not in hf_config.rope_parameters:
            return f"rope_parameters says nothing of {kind} layers"
        if dim < 2 or dim % 2 or groups < 1 or hf_config.num_attention_heads % groups:
            queries = hf_config.num_attention_heads
            return f"{kind} layers cannot have {queries} query heads, head_dim={dim} and num_key_value_heads={groups}"
    for kind, sizes in own:
        if sizes != dict(own)[kind]:
            return f"per_layer_config gives {kind} layers heads that differ: {sizes} and {dict(own)[kind]}"
    if reason := unsupported_window(hf_config):
        return reason
    if not hf_config.enable_moe_block:
        return None
    return check_choice(hf_config, EXPERTS)


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden, ffn, queries = hf_config.hidden_size, hf_config.intermediate_size, hf_config.num_attention_heads
    vocabulary = (hf_config.vocab_size, hidden)
    by_layer = {
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "layer_scalar": (1,),
        **{f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{side}_feedforward_layernorm{n}.weight": (hidden,) for side in ("pre", "post") for n in ("", "_1", "_2")},
    }
    if hf_config.enable_moe_block:
        experts, width = hf_config.num_experts, hf_config.moe_intermediate_size
        by_layer |= {
            "router.proj.weight": (experts, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (experts,),
            "experts.gate_up_proj": (experts, 2 * width, hidden),
            "experts.down_proj": (experts, hidden, width),
        }
    named = {_H + name: shape for name, shape in by_layer.items()}
    for layer in range(hf_config.num_hidden_layers):
        dim, groups = head_sizes(hf_config, layer)
        attention = f"model.layers.{layer}.self_attn."
        named |= {
            attention + "q_proj.weight": (queries * dim, hidden),
            attention + "k_proj.weight": (groups * dim, hidden),
            attention + "v_proj.weight": (groups * dim, hidden),
            attention + "o_proj.weight": (hidden, queries * dim),
            attention + "q_norm.weight": (dim,),
            attention + "k_norm.weight": (dim,),
        }
    return named | {
        "model.embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "model.norm.weight": (hidden,),
    }


FAMILY = ModelFamily(
    model_type="gemma4_text",
    fields=ConfigFields(
        used=USED_FIELDS
        | EXPERTS.names
        | {"sliding_window", "final_logit_softcapping", "attention_k_eq_v", "enable_moe_block"},
        accepts={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "attention_dropout": (0.0, None),
            "use_bidirectional_attention": (None, "vision"),  # of images only
        },
        checks={
            "rope_parameters": unsupported_rope,
            "layer_types": unsupported_kinds,
            "hidden_size_per_layer_input": lambda size: _only_larger(size, "an embedding of its own for each layer"),
            "num_kv_shared_layers": lambda layers: _only_larger(layers, "layers that take keys and values of others"),
        },
        # the two go with embeddings for each layer and with layers that share keys and values
        without_effect=WITHOUT_EFFECT | {"vocab_size_per_layer_input", "use_double_wide_mlp"},
        together=_unsupported,
        by_layer=frozenset({"head_dim", "num_key_value_heads"}),
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *LAYER, FINAL_NORM, HEAD),
        experts=lambda hf_config: EXPERTS.count(hf_config) if hf_config.enable_moe_block else 0,
    ),
    transformer_config=transformer_config,
    gpt_model=gpt_model,
    layer_spec=spec,
    inverse_frequencies=inverse_frequencies,
    heads=heads,
    shapes=shapes,
    adapt=adapt,
    shared=("num_attention_heads", "intermediate_size"),
    also_shared=lambda hf_config: {
        f"num_key_value_heads of {kind} layers": head_sizes(hf_config, kind)[1] for kind in rotary_columns(hf_config)
    },
)
