"""The error of an engine that cannot do what was asked of it now."""


class EngineError(RuntimeError):
    """An engine is stopped, has failed, or holds no usable weights. The message says which and what to do."""
