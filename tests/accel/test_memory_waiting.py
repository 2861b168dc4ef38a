"""A release is over when the driver says that the memory is free, not when the allocator has let go."""

from __future__ import annotations

import pytest

from accel.backends.cpu import CpuAccelerator
from accel.contract import Capabilities, MemoryInfo
from accel.memory.waiting import MemoryNotFreed, wait_for_room, wait_until_freed

GIB = 1 << 30


class SlowDriver(CpuAccelerator):
    """Says that nothing is free until it has been asked ``patience`` times."""

    capabilities = Capabilities()

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.patience, self.asked = patience, 0

    def memory_info(self, index: int | None = None) -> MemoryInfo:
        self.asked += 1
        free = 9 * GIB if self.asked >= self.patience else GIB
        return MemoryInfo(free=free, total=10 * GIB, allocated=0, reserved=0)


BEFORE = MemoryInfo(free=GIB, total=10 * GIB, allocated=8 * GIB, reserved=8 * GIB)


def test_it_waits_until_the_device_says_so():
    driver = SlowDriver(patience=4)
    wait_until_freed(driver, BEFORE, 8 * GIB, timeout=30.0, side="the engine")
    assert driver.asked == 4
    wait_for_room(SlowDriver(patience=3), 8 * GIB, timeout=30.0, side="the trainer")


def test_it_says_what_was_given_back_and_what_is_free():
    with pytest.raises(
        MemoryNotFreed, match=r"the engine gave 8.00 GiB .* 0.001 s .*0.00 GiB more than before are free"
    ):
        wait_until_freed(SlowDriver(patience=1000), BEFORE, 8 * GIB, timeout=0.001, side="the engine")
    with pytest.raises(MemoryNotFreed, match=r"the trainer takes 8.00 GiB .* 1.00 GiB are free"):
        wait_for_room(SlowDriver(patience=1000), 8 * GIB, timeout=0.001, side="the trainer")


def test_nothing_is_waited_for_where_giving_back_is_done_at_once():
    wait_until_freed(CpuAccelerator(), BEFORE, 8 * GIB, timeout=0.0, side="the engine")
    wait_for_room(CpuAccelerator(), 1000 * GIB, timeout=0.0, side="the trainer")
