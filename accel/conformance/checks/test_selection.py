"""The backend says what it is, and a process that runs on it runs on nothing else."""

from __future__ import annotations

import re

import pytest
import torch

from accel import AcceleratorError, Capabilities, accelerator_spec, get_accelerator, select_accelerator
from accel.comm import is_accelerator_backend, process_group_backend, weight_update_backend
from accel.contract import Accelerator
from accel.registry import process_registry


def test_it_is_the_selected_one(accelerator: Accelerator) -> None:
    assert get_accelerator() is accelerator
    assert select_accelerator(accelerator.name, emulate=accelerator.emulated) is accelerator


def test_another_choice_afterwards_is_refused(accelerator: Accelerator) -> None:
    other = next(name for name in process_registry().registrations() if name != accelerator.name)
    with pytest.raises(AcceleratorError, match=accelerator.name):
        select_accelerator(other)


def test_facts_are_well_formed(accelerator: Accelerator) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_-]*", accelerator.name)
    assert isinstance(accelerator.capabilities, Capabilities)
    assert torch.device(accelerator.device_type).type == accelerator.device_type
    for variable in (accelerator.visible_devices_env, accelerator.ray_noset_env, accelerator.allocator_env):
        assert variable is None or re.fullmatch(r"[A-Z][A-Z0-9_]*", variable)


def test_it_sees_a_device_and_can_name_it(accelerator: Accelerator) -> None:
    assert accelerator.unavailable_reason() is None
    assert accelerator.device_count() >= 1
    assert accelerator.device_name(0)


def test_workers_can_import_its_factory(accelerator: Accelerator) -> None:
    assert accelerator_spec(accelerator).startswith(f"{accelerator.name}=")


def test_backend_strings_are_its_own(accelerator: Accelerator) -> None:
    assert is_accelerator_backend(process_group_backend(accelerator), accelerator)
    assert is_accelerator_backend(weight_update_backend(accelerator), accelerator)


def test_a_library_written_for_cuda_finds_what_it_calls(accelerator: Accelerator) -> None:
    namespace = accelerator.torch_namespace()
    for name in (
        "is_available",
        "device_count",
        "current_device",
        "set_device",
        "synchronize",
        "manual_seed",
        "get_rng_state",
    ):
        assert callable(getattr(namespace, name)), name
    assert torch.empty(0, device=namespace.current_device()).device.type == accelerator.device_type
