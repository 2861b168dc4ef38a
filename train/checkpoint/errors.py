"""The error of a checkpoint that could not be written; raised in workers, understood by the driver."""

import errno

from samples.errors import RunError

# What a disk says that is full, over its quota, or gone: no fault of ours, and nothing that a traceback would explain.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


class CheckpointWriteError(RunError):
    """A checkpoint could not be written. The state of the run is untouched."""
