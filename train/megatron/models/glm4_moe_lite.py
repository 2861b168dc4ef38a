"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, with the kind of each layer in a list."""

from __future__ import annotations

from typing import Any

from train.megatron.models.deepseek_v3 import latent_family


def is_mixture(hf_config: Any, layer: int) -> bool:
    return bool(hf_config.mlp_layer_types[layer] == "sparse")


def unsupported_layers(hf_config: Any) -> str | None:
    """Why ``mlp_layer_types`` cannot be used, or None."""
    kinds, layers = hf_config.mlp_layer_types, hf_config.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        return f"mlp_layer_types={kinds!r} has to say dense or sparse for each of {layers} layers"
    return None


FAMILY = latent_family(
    "glm4_moe_lite",
    is_mixture,
    layer_fields=frozenset({"mlp_layer_types"}),
    unsupported_layers=unsupported_layers,
)
