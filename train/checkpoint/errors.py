"""The error of a checkpoint that could not be written; raised in workers, understood by the driver."""

from samples.errors import RunError


class CheckpointWriteError(RunError):
    """A checkpoint could not be written. The state of the run is untouched."""
