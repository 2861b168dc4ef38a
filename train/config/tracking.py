"""Settings of what a run leaves for people to see, besides metrics.jsonl."""

from __future__ import annotations

from pydantic import Field

from train.config.sections import Section


class TrackingConfig(Section):
    """Tracking"""

    use_tensorboard: bool = Field(True, description="write TensorBoard's event files in the run directory")
    use_wandb: bool = Field(
        False,
        description="log to Weights & Biases (online with a login and a network, else to files for wandb sync; "
        "WANDB_MODE decides otherwise)",
    )
    wandb_project: str = Field("accelrl", min_length=1, description="its project")
    wandb_team: str | None = Field(None, description="its team or user (default: the login's)")
    wandb_group: str | None = Field(None, description="its group of runs")
    wandb_name: str | None = Field(None, description="its name of the run (default: the run directory's)")
    report: bool = Field(True, description="write report.html at the end: curves, transcripts, facts")
    transcripts_per_step: int = Field(
        4, ge=0, le=64, description="best and worst responses of a step that are kept in samples.jsonl (0: none)"
    )
