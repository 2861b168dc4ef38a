"""Settings of how new weights reach the rollout engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from train.config.sections import Section


class WeightUpdateConfig(Section):
    """Weight updates"""

    weight_update_channel: Literal["auto", "tensor", "distributed", "disk", "disk_delta"] = Field(
        "auto",
        description="how new weights reach the rollout engine: tensor (the machine's memory), distributed (a process "
        "group), disk (safetensors files), disk_delta (files of what changed); auto: tensor, and distributed between "
        "machines, and disk with SGLang servers",
    )
    weight_update_dir: str | None = Field(
        None,
        description="directory of the disk channels, which trainer and rollout worker both see (default: the output "
        "directory)",
    )
    update_weight_buffer_size: int = Field(
        512 * 1024 * 1024, ge=1, description="bytes of one bucket of weights; at most two are there at once"
    )
    weight_update_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="seconds that one step of a weight update may take"
    )
    weight_update_retries: int = Field(
        1,
        ge=0,
        description="times that a weight update which failed is made again, with everything, before the run ends on "
        "its error",
    )
    check_weight_update_equal: bool = Field(
        False, description="send the weights once more after each update, and compare them with the engine's"
    )
