"""Rotary position embedding from a Hugging Face configuration, as complex rotations."""

from __future__ import annotations

from typing import Any

import torch

# Types whose frequencies do not depend on the length of the batch at hand; the others go to the general decoder.
FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def rope_type(config: Any) -> str:
    return config.rope_parameters.get("rope_type", "default")


def inverse_frequencies(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2], and the factor that scales cosine and sine (1 for most types)."""
    if rope_type(config) == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope_type(config)](config)


def rotations(config: Any, head_dim: int, positions: int) -> torch.Tensor:
    """complex64 [positions, head_dim / 2]: (p, j) turns the pair (j, j + head_dim / 2) of a head at position p."""
    frequencies, scale = inverse_frequencies(config, head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos() * scale, angles.sin() * scale)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """Reorder a head's rows [..., head_dim, columns] so that the pair (j, j + head_dim / 2) lies side by side.

    Queries and keys made from such rows can be turned as complex numbers, in place and in one operation; their dot
    products are the same.
    """
    half = rows.shape[-2] // 2
    return torch.stack((rows[..., :half, :], rows[..., half:, :]), dim=-2).flatten(-3, -2)
