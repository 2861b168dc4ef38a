"""Settings of what a forward pass computes once more for its backward pass, instead of keeping it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from train.config.sections import Section


class RecomputeConfig(Section):
    """Activation recompute"""

    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="compute activations once more in the backward pass instead of keeping them: those of whole layers "
        "(full), or of parts of each (selective)",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None,
        description="with full: keep the input of every --recompute-num-layers layers (uniform, the default), or "
        "recompute that many layers of a pipeline stage and keep the others (block)",
    )
    recompute_num_layers: int | None = Field(None, ge=1, description="layers, with full (default: 1)")
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(
        (), description="with selective: which parts (default: core_attn)"
    )
