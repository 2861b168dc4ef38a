"""Host processors as devices."""

import os
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator, usable_cores


def test_it_presents_as_many_devices_as_asked(monkeypatch):
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "5")
    cpu = CpuAccelerator()
    cpu.set_device(4)
    assert (cpu.device_count(), cpu.current_device()) == (5, 4)
    with pytest.raises(AcceleratorError, match="no device 5: this process sees 5, 0 to 4"):
        cpu.set_device(5)


def test_it_presents_its_usable_cores_by_default(monkeypatch):
    monkeypatch.delenv("ACCELRL_CPU_DEVICES", raising=False)
    assert CpuAccelerator().device_count() == usable_cores() >= 1


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "٣", "4097", "99999999999", "9" * 5000])
def test_a_number_of_devices_that_is_none_makes_it_unusable(monkeypatch, value):
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", value)
    with pytest.raises(AcceleratorError, match=f"ACCELRL_CPU_DEVICES='{value[:20]}'"):
        CpuAccelerator().unavailable_reason()


def test_its_device_is_never_numbered():
    assert CpuAccelerator().device() == CpuAccelerator().device(0) == torch.device("cpu")


def test_its_workers_do_not_spin():
    env = CpuAccelerator().worker_env(threads=2)
    assert env["OMP_NUM_THREADS"] == "2"
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("passive", "0")
    assert env["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_a_capability_it_lacks_is_refused_and_a_misspelt_one_is_an_error():
    with pytest.raises(AcceleratorError, match="'cpu' has no streams"):
        CpuAccelerator().stream()
    with pytest.raises(AttributeError):
        CpuAccelerator().require("straems")


def test_memory_is_within_the_machines():
    info = CpuAccelerator().memory_info()
    assert 0 < info.free <= info.total
    assert 0 < info.allocated < info.total


class NeedsSettings(CpuAccelerator):
    """A backend whose library reads variables before it is deterministic."""

    deterministic_env: ClassVar = {"ACME_WORKSPACE": ":4096:8", "ACME_ALGO": "Ring"}


@pytest.fixture
def settings_as_they_were():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.usefixtures("settings_as_they_were")
def test_deterministic_kernels_come_with_the_variables_that_they_need(monkeypatch):
    monkeypatch.delenv("ACME_WORKSPACE", raising=False)
    monkeypatch.setenv("ACME_ALGO", "Tree")  # the user's own choice stands
    NeedsSettings().use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled()
    assert (os.environ["ACME_WORKSPACE"], os.environ["ACME_ALGO"]) == (":4096:8", "Tree")
    monkeypatch.delenv("ACME_WORKSPACE")


def test_deterministic_kernels_are_refused_where_they_are_not_declared():
    class Without(CpuAccelerator):
        capabilities = replace(CpuAccelerator.capabilities, deterministic=False)

    with pytest.raises(AcceleratorError, match="has no deterministic"):
        Without().use_deterministic_algorithms()
    assert not torch.are_deterministic_algorithms_enabled()
