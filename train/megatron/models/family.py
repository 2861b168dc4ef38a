"""What a model family is to the trainer: a model_type, the fields of its config, and where its weights go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.megatron.models.decoder import decoder_arguments
from train.megatron.models.fields import ConfigFields
from train.megatron.models.heads import head_geometry
from train.megatron.models.rope import inverse_frequencies
from train.megatron.weights.table import WeightTable
from train.megatron.weights.transforms import HeadGeometry


@dataclass(frozen=True)
class ModelFamily:
    """One family; its file in this package holds everything that is particular to it.

    transformer_config: Hugging Face config -> keyword arguments of Megatron's TransformerConfig that describe the
    architecture (how it runs, dtype and parallel sizes, is added by ``train.megatron.model``). gpt_model: likewise for
    GPTModel. layer_spec: (TransformerConfig, Hugging Face config) -> Megatron's spec of the decoder block; it imports
    Megatron, so it is called only after ``prepare_megatron``. inverse_frequencies: of each rotated pair of elements,
    in float32. heads: geometry of the merged query/key/value matrix in a layer (None outside of layers). shapes: of
    every Hugging Face tensor that ``weights`` names, by the name with ``{layer}`` and ``{expert}`` left open, or filled
    in where layers differ. shared: sizes that tensor-parallel ranks share and so have to divide, by the field's name;
    also_shared: those that no field names. adapt: what is done to a built model, by the Hugging Face config, that no
    spec says.
    """

    model_type: str
    fields: ConfigFields
    weights: WeightTable
    transformer_config: Callable[[Any], dict[str, Any]]
    layer_spec: Callable[[Any, Any], Any]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    gpt_model: Callable[[Any], dict[str, Any]] = decoder_arguments
    inverse_frequencies: Callable[[Any], Any] = inverse_frequencies
    heads: Callable[[Any, int | None], HeadGeometry] = head_geometry
    shared: tuple[str, ...] = ("num_key_value_heads", "num_attention_heads", "intermediate_size")
    also_shared: Callable[[Any], dict[str, int]] | None = None
    adapt: Callable[[Any, Any], None] | None = None

    def shared_sizes(self, hf_config: Any) -> dict[str, int]:
        """Every size that the tensor-parallel size has to divide."""
        sizes = {name: int(getattr(hf_config, name)) for name in self.shared}
        return sizes | (self.also_shared(hf_config) if self.also_shared else {})

    def experts(self, hf_config: Any) -> int:
        """Experts in each layer that has any; 0 for a dense model."""
        return self.weights.experts(hf_config) if self.weights.experts else 0
