"""Settings of checkpoints."""

from __future__ import annotations

from pydantic import Field

from train.config.sections import Section


class CheckpointConfig(Section):
    """Checkpoints"""

    save: str | None = Field(
        None, description="directory of the run's checkpoints (default: checkpoints in the output directory, if saved)"
    )
    save_interval: int | None = Field(
        None, ge=1, description="save every so many steps too (default: only at the end and when stopped)"
    )
    save_keep: int | None = Field(None, ge=1, description="remove all but the newest so many (default: keep all)")
    async_save: bool = Field(
        False,
        description="write the checkpoints of --save-interval while training goes on, from a copy in host memory",
    )
    load: str | None = Field(
        None,
        description="resume from this checkpoint, or the newest in this directory; auto: the newest in --save, if any",
    )

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return self.save is not None or self.save_interval is not None
