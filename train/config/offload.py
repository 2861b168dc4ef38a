"""Settings of devices that training and rollout take turns on."""

from __future__ import annotations

from pydantic import Field

from train.config.sections import Section


class OffloadConfig(Section):
    """Turns on the same devices"""

    colocate: bool = Field(
        False, description="rollout uses the devices that train, in turn; each side gives its memory back meanwhile"
    )
    offload: bool = Field(
        False, description="give memory back between turns, on both sides; on with --colocate unless switched off"
    )
    offload_train: bool | None = Field(
        None,
        description="weights, gradients and optimizer state of the trainer leave the device while the rollout "
        "generates (default: as --offload)",
    )
    offload_rollout: bool | None = Field(
        None,
        description="weights and cache of the rollout engine leave the device while the trainer trains (default: as "
        "--offload)",
    )
    offload_dir: str | None = Field(
        None,
        description="directory of the trainer's memory where devices have the host's, as on cpu (default: the output "
        "directory; elsewhere it goes to host memory)",
    )
    offload_timeout: float = Field(
        120.0, gt=0, allow_inf_nan=False, description="seconds until memory that was given back must be free"
    )
    check_offload_equal: bool = Field(
        False, description="compare checksums of the trainer's memory before it leaves the device and after it is back"
    )

    @property
    def offloads_trainer(self) -> bool:
        return self.offload or self.colocate if self.offload_train is None else self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        return self.offload or self.colocate if self.offload_rollout is None else self.offload_rollout

    @property
    def takes_turns(self) -> bool:
        """Whether a side needs the other to stand still."""
        return self.colocate or self.offloads_trainer or self.offloads_rollout
