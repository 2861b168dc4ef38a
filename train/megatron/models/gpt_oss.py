"""gpt-oss: attention sinks, every second layer with a sliding window, biases everywhere, clamped and shifted SwiGLU.

Checkpoints stack the experts of a layer in one tensor, transposed, with gate and up in alternation.
"""

from __future__ import annotations

from typing import Any

from train.megatron.models.decoder import (
    ACCEPTED,
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    QKV_BIAS,
    USED_FIELDS,
    block_spec,
    core_attention,
    decoder_config,
    layer_spec,
    tensor_shapes,
    unsupported_kinds,
    unsupported_window,
    uses_engine,
)
from train.megatron.models.family import ModelFamily
from train.megatron.models.fields import WITHOUT_EFFECT, ConfigFields
from train.megatron.models.mixture import WITHOUT_EFFECT_OF_ROUTER, ExpertFields, check_choice, mixture_config
from train.megatron.models.rope import unsupported_rope
from train.megatron.weights.table import COLUMN, WeightEntry, WeightTable
from train.megatron.weights.transforms import IDENTITY, TRANSPOSE, TRANSPOSE_GATE_UP

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_EXPERT = _M + "mlp.experts.local_experts.{expert}."

SINKS = WeightEntry(_M + "self_attention.core_attention.softmax_offset", (_H + "self_attn.sinks",), split=COLUMN)
PROJECTION_BIAS = WeightEntry(_M + "self_attention.linear_proj.bias", (_H + "self_attn.o_proj.bias",))
MIXTURE = (
    WeightEntry(_M + "mlp.router.weight", (_H + "mlp.router.weight",)),
    WeightEntry(_M + "mlp.router.bias", (_H + "mlp.router.bias",)),
    WeightEntry(_EXPERT + "linear_fc1.weight", (_H + "mlp.experts.gate_up_proj",), TRANSPOSE_GATE_UP),
    WeightEntry(_EXPERT + "linear_fc1.bias", (_H + "mlp.experts.gate_up_proj_bias",), TRANSPOSE_GATE_UP),
    WeightEntry(_EXPERT + "linear_fc2.weight", (_H + "mlp.experts.down_proj",), TRANSPOSE),
    WeightEntry(_EXPERT + "linear_fc2.bias", (_H + "mlp.experts.down_proj_bias",), IDENTITY),
)


EXPERTS = ExpertFields(experts="num_local_experts", width="intermediate_size")


def transformer_config(hf_config: Any) -> dict[str, Any]:
    mixture = mixture_config(hf_config, EXPERTS)
    return decoder_config(hf_config) | mixture | {"add_bias_linear": True}


def spec(config: Any, hf_config: Any) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from train.megatron.activation import ClampedSwiGLU
    from train.megatron.expert_bias import BiasedExpertLinear

    activation = ModuleSpec(
        ClampedSwiGLU, params={"alpha": hf_config.swiglu_alpha, "limit": float(hf_config.swiglu_limit)}
    )

    def layer(i: int) -> Any:
        built = layer_spec(config, hf_config, experts=config.num_moe_experts)
        experts = built.submodules.mlp.submodules.experts.submodules
        experts.activation_func = activation
        if not uses_engine(config):
            experts.linear_fc2 = BiasedExpertLinear
        window = hf_config.sliding_window if hf_config.layer_types[i] == "sliding_attention" else None
        built.submodules.self_attention.submodules.core_attention = core_attention(hf_config, window=window, sinks=True)
        return built

    return block_spec(config, layer)


def shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    hidden, width, experts = hf_config.hidden_size, hf_config.intermediate_size, hf_config.num_local_experts
    return tensor_shapes(hf_config) | {
        _H + "self_attn.sinks": (hf_config.num_attention_heads,),
        _H + "self_attn.o_proj.bias": (hidden,),
        _H + "mlp.router.weight": (experts, hidden),
        _H + "mlp.router.bias": (experts,),
        _H + "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
        _H + "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        _H + "mlp.experts.down_proj": (experts, width, hidden),
        _H + "mlp.experts.down_proj_bias": (experts, hidden),
    }


def _unsupported(hf_config: Any) -> str | None:
    if not hf_config.swiglu_limit > 0:
        return f"swiglu_limit={hf_config.swiglu_limit!r} has to be above 0"
    return unsupported_window(hf_config) or check_choice(hf_config, EXPERTS)


FAMILY = ModelFamily(
    model_type="gpt_oss",
    fields=ConfigFields(
        used=USED_FIELDS
        | EXPERTS.names
        | {
            "swiglu_alpha",
            "swiglu_limit",
            "layer_types",
            "sliding_window",
        },
        accepts=ACCEPTED | {"attention_bias": (True,)},
        checks={"rope_parameters": unsupported_rope, "layer_types": unsupported_kinds},
        without_effect=WITHOUT_EFFECT | WITHOUT_EFFECT_OF_ROUTER,
        together=_unsupported,
    ),
    weights=WeightTable(
        entries=(EMBEDDING, *ATTENTION, *QKV_BIAS, PROJECTION_BIAS, SINKS, *NORMS, *MIXTURE, FINAL_NORM, HEAD),
        experts=EXPERTS.count,
    ),
    transformer_config=transformer_config,
    layer_spec=spec,
    shapes=shapes,
    shared=("num_key_value_heads", "num_attention_heads"),
)
