"""The embedded rollout engine: any accelerator that runs PyTorch, no server, decoding on a thread of its own."""

from rollout.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
