"""What a model family is to the trainer: a model_type, the fields of its config, and where its weights go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.megatron.models.fields import ConfigFields
from train.megatron.weights.table import WeightTable
from train.megatron.weights.transforms import HeadGeometry


@dataclass(frozen=True)
class ModelFamily:
    """One family; its file in this package holds everything that is particular to it.

    transformer_config: Hugging Face config -> keyword arguments of Megatron's TransformerConfig that describe the
    architecture (how it runs, dtype and parallel sizes, is added by ``train.megatron.model``). gpt_model: likewise for
    GPTModel. layer_spec: (TransformerConfig, Hugging Face config) -> Megatron's spec of the decoder block; it imports
    Megatron, so it is called only after ``prepare_megatron``. inverse_frequencies: rotary frequencies [head_dim / 2] in
    float32. heads: geometry of the merged query/key/value matrix. shapes: of every Hugging Face tensor that ``weights``
    names, by the name with ``{layer}`` left open.
    """

    model_type: str
    fields: ConfigFields
    weights: WeightTable
    transformer_config: Callable[[Any], dict[str, Any]]
    gpt_model: Callable[[Any], dict[str, Any]]
    layer_spec: Callable[[Any, Any], Any]
    inverse_frequencies: Callable[[Any], Any]
    heads: Callable[[Any], HeadGeometry]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
