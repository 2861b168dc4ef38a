"""Attention head sizes from a Hugging Face config."""

from __future__ import annotations

from typing import Any

from train.megatron.weights.transforms import HeadGeometry


def head_dim(hf_config: Any) -> int:
    """Elements of one head; configs without the field (Qwen2) divide the hidden size by the heads."""
    explicit = getattr(hf_config, "head_dim", None)
    return int(explicit or hf_config.hidden_size // hf_config.num_attention_heads)


def head_geometry(hf_config: Any, _layer: int | None = None) -> HeadGeometry:
    """Geometry of the merged query/key/value matrix."""
    return HeadGeometry(head_dim(hf_config), hf_config.num_attention_heads // hf_config.num_key_value_heads)
