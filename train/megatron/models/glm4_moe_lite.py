"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, with the kind of each layer in a list."""

from __future__ import annotations

from typing import Any

from train.megatron.models.deepseek_v3 import latent_family


def is_mixture(hf_config: Any, layer: int) -> bool:
    return bool(hf_config.mlp_layer_types[layer] == "sparse")


FAMILY = latent_family("glm4_moe_lite", is_mixture, layer_fields=frozenset({"mlp_layer_types"}))
