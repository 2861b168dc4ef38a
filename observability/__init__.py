"""What happened: metrics, where they go, and what a person sees of them."""

from observability.history import History, summary_line
from observability.progress import Progress
from observability.rollout_metrics import RolloutMetrics, rollout_metrics
from observability.timing import StepTimer
from observability.trackers import JsonlTracker, MultiTracker, Tracker

__all__ = [
    "History",
    "JsonlTracker",
    "MultiTracker",
    "Progress",
    "RolloutMetrics",
    "StepTimer",
    "Tracker",
    "rollout_metrics",
    "summary_line",
]
