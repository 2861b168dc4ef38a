"""Checks that need more than one field, or a look at the file system: made before any worker starts."""

from train.config.checks.everything import validate

__all__ = ["validate"]
