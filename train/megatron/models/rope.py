"""Rotary frequencies as Hugging Face computes them, for the scalings that need nothing but other frequencies."""

from __future__ import annotations

import math
from typing import Any

import torch

from train.megatron.models.heads import head_dim

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SUPPORTED_ROPE = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}  # and the numbers that each goes by
_MOST = 1e18


def unsupported_rope(parameters: Any) -> str | None:
    """Why these ``rope_parameters`` cannot be used, or None."""
    kind = (parameters or {}).get("rope_type", "default")
    if not isinstance(kind, str) or kind not in SUPPORTED_ROPE:
        return f"rope_type {kind!r} is not implemented, of {', '.join(SUPPORTED_ROPE)}"
    if parameters and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding is not implemented for this family"
    for name in ("rope_theta", *SUPPORTED_ROPE[kind]):
        value = (parameters or {}).get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST:
            return f"{name} has to be a number above 0, not {value!r}"
    if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        return "low_freq_factor has to be less than high_freq_factor"
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
