"""Rotary frequencies as Hugging Face computes them, for the scalings that need nothing but other frequencies."""

from __future__ import annotations

import math
from typing import Any

import torch

from train.megatron.models.heads import head_dim

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings")
# What is implemented, and the numbers that each goes by.
SUPPORTED_ROPE = {"default": (), "linear": ("factor",), "llama3": _LLAMA3, "yarn": _YARN}
_MOST = 1e18
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def unsupported_rope(parameters: Any) -> str | None:
    """Why these ``rope_parameters`` cannot be used where every element of a head is turned, or None."""
    if parameters and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding is not implemented for this family"
    return unsupported_partial_rope(parameters)


def unsupported_partial_rope(parameters: Any) -> str | None:
    """Why these ``rope_parameters`` cannot be used, or None."""
    parameters = parameters or {}
    kind = parameters.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in SUPPORTED_ROPE:
        return f"rope_type {kind!r} is not implemented, of {', '.join(SUPPORTED_ROPE)}"
    turned = parameters.get("partial_rotary_factor", 1.0)
    if not _positive(turned) or turned > 1:
        return f"partial_rotary_factor has to be a number above 0 and at most 1, not {turned!r}"
    for name in ("rope_theta", *SUPPORTED_ROPE[kind]):
        if not _positive(parameters.get(name)):
            return f"{name} has to be a number above 0, not {parameters.get(name)!r}"
    if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        return "low_freq_factor has to be less than high_freq_factor"
    return _unsupported_yarn(parameters) if kind == "yarn" else None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST


def _unsupported_yarn(parameters: dict[str, Any]) -> str | None:
    for name in _YARN_OPTIONAL:
        value = parameters.get(name)
        if value is not None and value != 0 and not _positive(value):
            return f"{name} has to be a number, not {value!r}"
    if parameters["factor"] < 1 or parameters["rope_theta"] <= 1:
        return "yarn needs a factor of at least 1 and a rope_theta above 1"
    if parameters.get("attention_factor") == 0:
        return "attention_factor=0 would make all tokens alike"
    return None


def unsupported_latent_rope(parameters: Any) -> str | None:
    """The same for latent attention, which published models scale by yarn."""
    kind = (parameters or {}).get("rope_type", "default")
    if kind not in ("default", "yarn"):
        return f"rope_type {kind!r} is not implemented, of default, yarn"
    if reason := unsupported_rope(parameters):
        return reason
    if kind == "yarn" and yarn_scale(parameters) != 1.0:
        return "cosine and sine would be scaled (mscale is not mscale_all_dim), which latent attention does not do here"
    return None


def rotary_scale(hf_config: Any) -> float:
    """What scales the cosine and sine, and so the product of a turned query and key by its square."""
    rope = hf_config.rope_parameters
    return yarn_scale(rope) if rope.get("rope_type", "default") == "yarn" else 1.0


def yarn_scale(parameters: dict[str, Any]) -> float:
    """What yarn multiplies cosine and sine by (Peng et al. 2023, equation 22, with transformers' two mscales)."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor, mscale, over_all = (parameters.get(name) for name in ("factor", "mscale", "mscale_all_dim"))
    if mscale and over_all:
        return _log_scale(factor, mscale) / _log_scale(factor, over_all)
    return _log_scale(factor, 1.0)


def _log_scale(factor: Any, mscale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(mscale) * math.log(factor) + 1.0


def rotary_dim(hf_config: Any) -> int:
    """Elements of each head that are turned, from the first."""
    return int(head_dim(hf_config) * hf_config.rope_parameters.get("partial_rotary_factor", 1.0))


def inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """Angle per position of each turned pair of elements: float32 on the host, bit-equal to transformers'.

    ``linear`` divides all of them by ``factor``; ``llama3`` divides the long wavelengths and blends between two bounds
    (Llama 3.1, section "Long context"; Megatron's own version of it has the bounds fixed); ``yarn`` likewise, with a
    ramp over the pairs (Qwen2.5 and Qwen3 beyond their 32,768 tokens).
    """
    rope = hf_config.rope_parameters
    dim = rotary_dim(hf_config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return _llama3(frequencies, rope)
    if kind == "yarn":
        return _yarn(dim, rope)
    return frequencies


def _yarn(dim: int, rope: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by ``factor``, short ones kept, with a ramp between (Peng et al. 2023, 3.2)."""
    base, context = rope["rope_theta"], rope["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """Of the pair of elements that turns so many times over the context."""
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    wavelength = base ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (rope["factor"] * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _llama3(frequencies: torch.Tensor, rope: dict[str, float]) -> torch.Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = frequencies / rope["factor"]
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled + blend * frequencies
    result = torch.where(wavelengths > context / low, scaled, frequencies)
    return torch.where((wavelengths >= context / high) & (wavelengths <= context / low), blended, result)
