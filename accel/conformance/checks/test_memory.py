"""What the backend says about memory follows what is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from accel.contract import Accelerator

SIZE = 32 << 20  # bytes


def test_free_is_within_total(accelerator: Accelerator) -> None:
    for index in range(accelerator.device_count()):
        info = accelerator.memory_info(index)
        if info.total is not None and info.free is not None:
            assert 0 <= info.free <= info.total
        assert info.total is None or info.total > 0
        for name, value in asdict(info).items():
            assert value is None or value >= 0, f"{name} of device {index} is {value} bytes"


def test_every_figure_is_there(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("memory_stats")
    for index in range(accelerator.device_count()):
        figures = asdict(accelerator.memory_info(index))
        assert all(isinstance(value, int) for value in figures.values()), f"device {index}: {figures}"


def test_clearing_up_can_be_asked_of_every_backend(accelerator: Accelerator) -> None:
    accelerator.empty_cache()
    accelerator.ipc_collect()
    accelerator.reset_peak_memory()
    for index in range(accelerator.device_count()):
        accelerator.reset_peak_memory(index)


def test_allocated_and_peak_follow_a_tensor(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("memory_stats")
    gc.collect()
    accelerator.empty_cache()
    accelerator.reset_peak_memory()
    before = accelerator.memory_info()
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=accelerator.device())
    during = accelerator.memory_info()
    del tensor
    after = accelerator.memory_info()
    assert before.allocated is not None
    assert during.allocated is not None
    assert during.allocated - before.allocated >= SIZE
    assert after.allocated == before.allocated
    assert after.peak is not None
    assert after.peak >= before.allocated + SIZE
    assert during.reserved is not None
    assert during.reserved >= during.allocated


def test_an_emptied_cache_is_given_back(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("memory_stats")
    torch.zeros(SIZE, dtype=torch.uint8, device=accelerator.device())
    accelerator.synchronize()
    accelerator.empty_cache()
    info = accelerator.memory_info()
    assert info.reserved is not None
    assert info.allocated is not None
    assert info.reserved < info.allocated + SIZE


def test_running_out_is_observed(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("oom_observer")
    seen: list[tuple[int, ...]] = []
    accelerator.attach_oom_observer(lambda *numbers: seen.append(numbers))
    total = accelerator.memory_info().total
    assert total is not None
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4 * total, dtype=torch.uint8, device=accelerator.device())
    assert seen
    assert seen[0][1] >= 4 * total


def test_a_snapshot_is_written(accelerator: Accelerator, needs: Callable[..., None], tmp_path: Path) -> None:
    needs("memory_snapshot")
    accelerator.record_memory_history(enabled=True)
    torch.zeros(1 << 20, device=accelerator.device())
    accelerator.save_memory_snapshot(tmp_path / "memory.pickle")
    accelerator.record_memory_history(enabled=False)
    assert (tmp_path / "memory.pickle").stat().st_size > 0


def test_the_profiler_sees_work(accelerator: Accelerator) -> None:
    with torch.profiler.profile(activities=accelerator.profiler_activities()) as profile:
        torch.ones(64, 64, device=accelerator.device()).matmul(torch.ones(64, 64, device=accelerator.device()))
        accelerator.synchronize()
    assert any("mm" in event.key for event in profile.key_averages())
