"""Rollouts on disk: recorded as they are handed to training, and handed to training again without an engine."""
