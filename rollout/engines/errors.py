"""The error of an engine that cannot do what was asked of it now."""

from samples.errors import RunError


class EngineError(RunError):
    """An engine is stopped, has failed, or holds no usable weights. The message says which and what to do."""
