"""The real torch_memory_saver on one device: a buffer that DeepEP would make inside its region outlives a pause.

    python ci/memory_saver_check.py [--accelerator NAME]

DeepEP itself needs more than one device, so a stand-in takes its module's name: it allocates and fills on a stream of
its own, as DeepEP does. Nothing else is replaced. Ends with 1 and says why when something is not as it must be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch

from accel import AcceleratorError, select_accelerator
from accel.contract import Accelerator
from accel.memory.deep_ep import install_deep_ep_guard
from accel.memory.saver import active_memory_saver, memory_saver_env

SIZE = 256 << 20  # bytes of each tensor
TAG = "weights"
PRELOADED = "--preloaded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cuda", metavar="NAME")
    parser.add_argument(PRELOADED, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        accelerator = select_accelerator(options.accelerator)
        if not options.preloaded:  # the library has to be there before torch is: in another process
            environment = os.environ | memory_saver_env(accelerator)
            return subprocess.run([sys.executable, *sys.argv, PRELOADED], env=environment, check=False).returncode
        outlives_a_pause(accelerator, active_memory_saver())
    except (AcceleratorError, AssertionError) as error:
        print(f"FAIL: {error}")
        return 1
    return 0


def outlives_a_pause(accelerator: Accelerator, saver: Any) -> None:
    """Two tensors in the region with a buffer made between them: a pause frees the two and nothing of the buffer."""
    buffer_class = stand_in(accelerator)
    install_deep_ep_guard(accelerator)
    with saver.region(tag=TAG):
        flag = saver._impl._binary_wrapper.cdll.tms_get_interesting_region
        before = filled(accelerator, 1)
        assert flag(), "the region's flag is not set inside the region"
        buffer = buffer_class()
        assert flag(), "the region's flag was not restored after the buffer was made"
        behind = filled(accelerator, 2)
    assert not flag(), "the region's flag is still set outside the region"
    accelerator.synchronize()

    held = free_bytes(accelerator)
    saver.pause(TAG)
    freed = free_bytes(accelerator) - held
    assert 2 * SIZE <= freed < 3 * SIZE, f"a pause freed {freed >> 20} MiB, and the region holds {2 * SIZE >> 20}"
    assert buffer.holds_its_values(), "the buffer lost its values at the pause"
    buffer.memory.add_(1)  # peers go on writing into it meanwhile
    saver.resume(TAG)
    assert buffer.holds_its_values(added=1), "the buffer lost its values when the region resumed"
    for tensor in (before, behind):  # no backup was asked for: other values, and memory that works
        tensor.fill_(5)
        assert int(tensor[-1]) == 5, "memory of the region does not work after it resumed"
    print(f"a pause freed {freed >> 20} MiB of {2 * SIZE >> 20} in the region; the buffer of {SIZE >> 20} MiB kept its")
    print("values through it and through the resume; the region's flag was restored")


def stand_in(accelerator: Accelerator) -> type:
    """A class ``Buffer`` in a module ``deep_ep``."""
    namespace = accelerator.torch_namespace()

    class Buffer:
        value = 7

        def __init__(self) -> None:
            self.stream = namespace.Stream()
            with namespace.stream(self.stream):
                self.memory = filled(accelerator, self.value)

        def holds_its_values(self, added: int = 0) -> bool:
            return bool((self.memory == self.value + added).all())

    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    return Buffer


def filled(accelerator: Accelerator, value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device=accelerator.device())


def free_bytes(accelerator: Accelerator) -> int:
    free = accelerator.memory_info().free
    assert free is not None, f"{accelerator.name} does not tell how much of its memory is free"
    return free


if __name__ == "__main__":
    sys.exit(main())
