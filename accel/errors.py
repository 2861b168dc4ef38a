"""Errors of the accelerator layer."""


class AcceleratorError(RuntimeError):
    """An accelerator was asked for that is not usable, or asked for something it cannot do. The message says what to do."""
