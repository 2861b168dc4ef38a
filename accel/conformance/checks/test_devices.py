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


def test_each_device_is_waited_for_by_its_index(accelerator: Accelerator) -> None:
    for index in range(accelerator.device_count()):
        torch.ones(64, 64, device=accelerator.device(index)).square_()
        accelerator.synchronize(index)
    accelerator.synchronize()


def test_each_device_has_a_name_and_an_identity_of_its_own(accelerator: Accelerator) -> None:
    indices = range(accelerator.device_count())
    assert all(isinstance(accelerator.device_name(index), str) and accelerator.device_name(index) for index in indices)
    uuids = [accelerator.device_uuid(index) for index in indices]
    assert all(uuid is None or (isinstance(uuid, str) and uuid) for uuid in uuids)
    known = [uuid for uuid in uuids if uuid is not None]
    assert len(known) in (0, len(uuids)), f"some devices have a UUID and some have none: {uuids}"
    assert len(set(known)) == len(known), f"two devices have one UUID: {uuids}"


def test_the_runtime_says_its_version_or_nothing(accelerator: Accelerator) -> None:
    version = accelerator.runtime_version()
    assert version is None or (isinstance(version, str) and version.strip())


def test_tensors_move_between_devices(accelerator: Accelerator) -> None:
    values = torch.arange(8.0)
    for index in range(accelerator.device_count()):
        assert torch.equal(values.to(accelerator.device(0)).to(accelerator.device(index)).cpu(), values)
