"""Errors of the accelerator layer."""


class AcceleratorError(RuntimeError):
    """An accelerator is not usable, or was asked for what it cannot do. The message says what to do."""
