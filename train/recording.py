"""What a run leaves behind: metrics in all trackers, transcripts, and the report."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from observability import JsonlTracker, MultiTracker, Progress, Tracker
from observability.background import BackgroundTracker
from observability.redact import redacted
from observability.tensorboard import TensorBoardTracker
from observability.transcripts import Transcripts
from samples.errors import InputError
from train.config.run import RunConfig
from train.config.tracking import TrackingConfig
from train.loop import StopRequest


def check_trackers(config: TrackingConfig) -> None:
    """Refuse ``--use-wandb`` where its package is not installed."""
    if config.use_wandb and importlib.util.find_spec("wandb") is None:
        raise InputError("--use-wandb needs the package wandb, which is not installed: pip install 'accelrl[wandb]'")


class Recording:
    """The open trackers and transcripts of a run; leaving it closes them and writes report.html.

    The report is also written after an interrupt, and after an error when a step was made. That it cannot be written
    is said and changes nothing else about how the run ends.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, facts: Mapping[str, Any], progress: Progress, stop: StopRequest
    ) -> None:
        self._tracking = config.tracking
        self._run_dir = run_dir
        self._progress = progress
        self._stop = stop
        self.tracker = open_trackers(config, run_dir, facts, progress.note)
        kept = self._tracking.transcripts_per_step > 0
        self.transcripts = Transcripts(run_dir / "samples.jsonl") if kept else None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.tracker.close()
        finally:
            if self.transcripts is not None:
                self.transcripts.close()
            if self._tracking.report and self._progress.history.steps:
                self._write_report(self._outcome(error))

    def _outcome(self, error: BaseException | None) -> str | None:
        if self._stop.requested or isinstance(error, KeyboardInterrupt):
            return "interrupted"
        return None if error is None else f"stopped by an error: {type(error).__name__}: {error}"

    def _write_report(self, outcome: str | None) -> None:
        from observability.report import write_report

        try:
            write_report(self._run_dir, outcome=outcome)
        except (OSError, InputError) as error:
            self._progress.note(f"report.html could not be written: {error}")


def open_trackers(
    config: RunConfig, run_dir: Path, facts: Mapping[str, Any], notify: Callable[[str], None]
) -> MultiTracker:
    """metrics.jsonl, and the trackers that the configuration names. Addresses lose their credentials on the way out."""
    tracking = config.tracking
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    if tracking.use_tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    if tracking.use_wandb:
        public = redacted(config.model_dump(mode="json") | {"run": dict(facts)})

        def open_wandb() -> Tracker:
            from observability.wandb_tracker import WandbTracker

            return WandbTracker(
                run_dir,
                public,
                project=tracking.wandb_project,
                name=tracking.wandb_name or run_dir.name,
                group=tracking.wandb_group,
                team=tracking.wandb_team,
                notify=notify,
            )

        trackers.append(BackgroundTracker("wandb", open_wandb, notify))
    return MultiTracker(trackers)
