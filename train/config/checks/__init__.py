"""Checks that need more than one field, or a look at the file system: all made before any worker starts."""

from train.config.checks.all import validate

__all__ = ["validate"]
