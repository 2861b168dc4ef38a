"""mbridge's side of ``model_io``: the same parameters, under the names that TransformerEngine's layers give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Named(nn.Module):
    """Parameters under names of our choice; nested names make nested modules."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            place: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(last, parameter)


class TransformerEngineNames(nn.Module):
    """A model's parameters, the very same objects, as a GPTModel of TransformerEngine's layers has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.decoder = nn.Module()
        layers = []
        for layer in model.decoder.layers:
            named = Named({engine_name(name): parameter for name, parameter in layer.named_parameters()})
            named.layer_number = layer.layer_number
            layers.append(named)
        self.decoder.layers = nn.ModuleList(layers)
        self.decoder.final_layernorm = model.decoder.final_layernorm
        self.embedding = model.embedding
        self.output_layer = model.output_layer


def engine_name(name: str) -> str:
    """Of a layer's parameter: norms are inside of the linear layer that follows, experts are numbered weights."""
    if name.startswith("mlp.experts.local_experts."):
        expert, linear, kind = name.removeprefix("mlp.experts.local_experts.").split(".")
        return f"mlp.experts.{linear}.{kind}{expert}"
    return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


class MbridgeSide:
    """mbridge's bridge for the model's config, on the model's own parameters."""

    def __init__(self, model: Any, hf_config: Any, dtype: torch.dtype) -> None:
        from mbridge import AutoBridge

        self.model = TransformerEngineNames(model)
        if model.config.num_moe_experts is None:
            for layer in self.model.decoder.layers:
                norm = layer.pre_mlp_layernorm
                layer.mlp.linear_fc1.register_parameter("layer_norm_weight", norm.weight)
                del layer.pre_mlp_layernorm
        self.bridge = AutoBridge.from_config(hf_config, dtype=dtype)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        self.bridge.load_weights([self.model], str(directory))

    @torch.no_grad()
    def save(self, target: Path) -> None:
        self.bridge.save_weights([self.model], str(target))
        with (target / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
