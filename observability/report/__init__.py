"""report.html: what a run has shown, in one file that needs nothing else."""

from observability.report.page import write_report

__all__ = ["write_report"]
