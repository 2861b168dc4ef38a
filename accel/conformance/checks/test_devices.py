"""Devices can be switched, tensors land where they should, and an index outside the range is refused."""

from __future__ import annotations

import pytest
import torch

from accel import AcceleratorError
from accel.contract import Accelerator


def test_switching_devices(accelerator: Accelerator) -> None:
    for index in reversed(range(accelerator.device_count())):
        accelerator.set_device(index)
        assert accelerator.current_device() == index
        tensor = torch.ones(4, device=accelerator.device())
        assert tensor.device.type == accelerator.device_type
        assert tensor.device.index in (index, None)
        accelerator.synchronize()
        assert tensor.sum().item() == 4


def test_an_index_outside_the_range_is_refused(accelerator: Accelerator) -> None:
    before = accelerator.current_device()
    for index in (accelerator.device_count(), -1):
        with pytest.raises(AcceleratorError, match=str(index)):
            accelerator.set_device(index)
    assert accelerator.current_device() == before


def test_tensors_move_between_devices(accelerator: Accelerator) -> None:
    values = torch.arange(8.0)
    for index in range(accelerator.device_count()):
        assert torch.equal(values.to(accelerator.device(0)).to(accelerator.device(index)).cpu(), values)
