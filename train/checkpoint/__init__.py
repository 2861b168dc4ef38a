"""Checkpoints of a run: what is in one, how it gets to the disk whole, and how a run goes on from it."""
