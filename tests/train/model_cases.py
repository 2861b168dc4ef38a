"""Tiny random models of every family, as transformers makes and saves them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from train.config.run import RunConfig
from train.megatron.model import build_model, load_hf_config
from train.megatron.models import family_of
from train.megatron.weights.exporting import iter_hf_weights
from train.megatron.weights.loading import load_hf_weights

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 4, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SIGMOID_MIXTURE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
GEMMA = {
    "hidden_size_per_layer_input": 0, "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4,
    "num_global_key_value_heads": 2, "sliding_window": 5, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
# A family, or after a slash one of its forms.
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v3": (
        DeepseekV3Config, DeepseekV3ForCausalLM,
        SIGMOID_MIXTURE | LATENT | {
            "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "rope_parameters": YARN,
        },
    ),
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM, GEMMA),
    "gemma4_text/key is value": (
        Gemma4TextConfig, Gemma4ForCausalLM,
        GEMMA | {"attention_k_eq_v": True, "final_logit_softcapping": 2.0},
    ),
    "gemma4_text/experts": (
        Gemma4TextConfig, Gemma4ForCausalLM,
        GEMMA | GEMMA_EXPERTS | {"attention_k_eq_v": True, "final_logit_softcapping": 2.0},
    ),
    "glm4_moe": (
        Glm4MoeConfig, Glm4MoeForCausalLM,
        SIGMOID_MIXTURE | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, SIGMOID_MIXTURE | LATENT | {"q_lora_rank": None}),
    "gpt_oss": (
        GptOssConfig, GptOssForCausalLM,
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "kimi_k2": (
        DeepseekV3Config, DeepseekV3ForCausalLM,
        SIGMOID_MIXTURE | LATENT | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"factor": 32.0}},
    ),
    "minimax_m2": (
        MiniMaxM2Config, MiniMaxM2ForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 16, "rotary_dim": 4},
    ),
    "glm4": (Glm4Config, Glm4ForCausalLM, {"head_dim": 8, "attention_bias": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, MIXTURE | {"shared_expert_intermediate_size": 24}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),  # not hidden size / heads
    "qwen3_moe": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        MIXTURE | {"head_dim": 24, "norm_topk_prob": True, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
}  # fmt: skip
SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": None,  # else transformers gives that token's embedding no gradient
}  # fmt: skip
EVERY_MODEL = [(model_type, tied) for model_type in KINDS for tied in (False, True)]


def tiny_config(model_type: str, tied: bool = False, **overrides: Any) -> Any:
    config_class, _, particular = KINDS[model_type]
    config = config_class(**(SIZES | particular | {"tie_word_embeddings": tied} | overrides))
    config._attn_implementation = "eager"
    return config


def tiny_model(model_type: str, tied: bool = False, **overrides: Any) -> Any:
    """Random weights, norms and biases included, from a fixed seed."""
    torch.manual_seed(0)
    model = KINDS[model_type][1](tiny_config(model_type, tied, **overrides)).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *saved_buffers(model).values()):
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def save_tiny(directory: Path, model_type: str, tied: bool = False, **overrides: Any) -> Any:
    model = tiny_model(model_type, tied, **overrides)
    model.save_pretrained(directory)
    if model_type == "kimi_k2":
        _as_kimi_is_published(directory / "config.json")
    return model


def _as_kimi_is_published(file: Path) -> None:
    """A name and code of its own, which is not run, and the rotary embedding as older transformers wrote it."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope | {"type": rope.pop("rope_type")},
    }
    file.write_text(json.dumps(config))


def on_disk(model: Any, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A model's saved tensors (or others under its names) as a checkpoint has them: experts apart, tied ones once."""
    if tensors is None:
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()} | saved_buffers(model)
    return dict(revert_weight_conversion(model, tensors))


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


@dataclass(frozen=True)
class Loaded:
    """A directory's model in Megatron, on this rank."""

    model: Any
    family: Any
    hf_config: Any

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in iter_hf_weights(self.model, self.family, self.hf_config)}


def load(directory: Path, config: RunConfig | None = None) -> Loaded:
    hf_config = load_hf_config(directory)
    family = family_of(hf_config)
    model = build_model(hf_config, config or RunConfig())
    load_hf_weights(model, family, hf_config, directory)
    return Loaded(model, family, hf_config)
