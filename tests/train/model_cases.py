"""Tiny random models of every family, as transformers makes and saves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from train.config.run import RunConfig
from train.megatron.model import build_model, load_hf_config
from train.megatron.models import family_of
from train.megatron.weights.exporting import iter_hf_weights
from train.megatron.weights.loading import load_hf_weights

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),  # not hidden size / heads
}
SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
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
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_tiny(directory: Path, model_type: str, tied: bool = False, **overrides: Any) -> Any:
    model = tiny_model(model_type, tied, **overrides)
    model.save_pretrained(directory)
    return model


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
