"""Rotary frequencies as Hugging Face computes them, for the scalings that need nothing but other frequencies."""

from __future__ import annotations

import math
from typing import Any

import torch

from train.megatron.models.heads import head_dim

SUPPORTED_ROPE = ("default", "linear", "llama3")


def unsupported_rope(parameters: Any) -> str | None:
    """Why these ``rope_parameters`` cannot be used, or None."""
    kind = (parameters or {}).get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        return f"rope_type {kind!r} is not implemented, of {', '.join(SUPPORTED_ROPE)}"
    if parameters and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding is not implemented for this family"
    return None


def inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """Angle per position of each pair of elements: float32 [head_dim / 2] on the host, bit-equal to transformers'.

    ``linear`` divides all of them by ``factor``; ``llama3`` divides the long wavelengths and blends between two bounds
    (Llama 3.1, section "Long context"; Megatron's own version of it has the bounds fixed).
    """
    rope = hf_config.rope_parameters
    dim = head_dim(hf_config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: dict[str, float]) -> torch.Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = frequencies / rope["factor"]
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled + blend * frequencies
    result = torch.where(wavelengths > context / low, scaled, frequencies)
    return torch.where((wavelengths >= context / high) & (wavelengths <= context / low), blended, result)
