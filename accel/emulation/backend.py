"""The musa backend on the emulated device: the same facts, less what host memory cannot do."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from accel.backends.musa import MusaAccelerator
from accel.contract import Accelerator
from accel.emulation.settings import DEVICES_ENV, EMULATE_ENV


class EmulatedMusaAccelerator(MusaAccelerator):
    """For tests and for development without the hardware. Its speed says nothing about any hardware."""

    emulated = True
    # Memory of this process is no other process's, so handles to it cannot be given away.
    capabilities = replace(MusaAccelerator.capabilities, ipc=False)

    def prepare(self) -> None:
        from accel.emulation.loading import load_emulation

        load_emulation()
        # torchada compiles kernels for the hardware when it is imported, and goes on without them.
        warnings.filterwarnings("ignore", message="Failed to load torchada C\\+\\+ ops: the emulated")
        super().prepare()

    def emulation(self) -> Accelerator:
        return self

    def runtime_version(self) -> str | None:
        return f"MUSA emulated on the host by torch {torch.__version__}"

    def more_devices_hint(self) -> str:
        return f"The emulation has as many devices as {DEVICES_ENV} says (16 at most)."

    def worker_env(self, threads: int) -> dict[str, str]:
        """Workers emulate as well, also where they make the backend by its name."""
        return super().worker_env(threads) | {EMULATE_ENV: "1"}
