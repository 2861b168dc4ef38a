"""Backends that are each wrong in one way, and the check of the suite that has to say so."""

from dataclasses import replace

import pytest
import torch

from accel.backends.cpu import CpuAccelerator
from accel.conformance.runner import run_conformance
from accel.contract import MemoryInfo
from tests.accel.fake_backends import BlindToItsMask, CountedByRay, ImportableAccelerator

HOST = CpuAccelerator.capabilities


def failed(accelerator, *subjects):
    report = run_conformance(accelerator, 1, list(subjects))
    return {outcome.check for outcome in report.outcomes if outcome.result == "FAIL"}


def mutant(base=CpuAccelerator, **members):
    return type("Mutant", (base,), members)()


def raises(self, *arguments, **named):
    raise RuntimeError("not implemented by this vendor")


def synchronizes_without_an_index(self, index=None):
    if index is not None:
        raise TypeError("no index")


def seeds_by_parity(self, seed):
    torch.default_generator.manual_seed(seed % 2)


DEVICES = [
    ({"synchronize": synchronizes_without_an_index}, "each device is waited for by its index"),
    ({"device_uuid": lambda self, index: "GPU-1"}, "each device has a name and an identity of its own"),
    ({"device_uuid": raises}, "each device has a name and an identity of its own"),
    ({"device_name": lambda self, index: ""}, "each device has a name and an identity of its own"),
    ({"runtime_version": raises}, "the runtime says its version or nothing"),
]
MEMORY = [
    ({"memory_info": lambda self, index=None: MemoryInfo(free=1, total=2, allocated=-5)}, "free is within total"),
    ({"memory_info": lambda self, index=None: MemoryInfo(free=-1, total=2)}, "free is within total"),
    ({"empty_cache": raises}, "clearing up can be asked of every backend"),
    ({"ipc_collect": raises}, "clearing up can be asked of every backend"),
    ({"reset_peak_memory": raises}, "clearing up can be asked of every backend"),
    ({"capabilities": replace(HOST, memory_stats=True)}, "every figure is there"),
]


@pytest.mark.parametrize(("members", "check"), DEVICES)
def test_devices_that_are_wrong(monkeypatch, members, check):
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "2")
    assert failed(mutant(**members), "devices") == {check}


@pytest.mark.parametrize(("members", "check"), MEMORY)
def test_memory_that_is_wrong(members, check):
    assert check in failed(mutant(**members), "memory")


def test_seeds_that_are_thrown_together():
    assert failed(mutant(manual_seed=seeds_by_parity), "random_numbers") == {"every seed is another"}


def test_a_workers_environment_that_is_empty(monkeypatch):
    monkeypatch.setattr(ImportableAccelerator, "worker_env", lambda self, threads: {})
    assert failed(ImportableAccelerator(), "ray") == {"workers are told their threads and load no other vendor"}


@pytest.mark.slow
def test_claims_that_do_not_hold(monkeypatch):
    """No expandable segments without an allocator, and no bf16 where products of it come out in fp32."""
    claims = replace(ImportableAccelerator.capabilities, expandable_segments=True, init_on_device=True)
    monkeypatch.setattr(ImportableAccelerator, "capabilities", claims)
    assert failed(ImportableAccelerator(), "capabilities") == {"segments expand"}
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: matmul(a.float(), b.float()))
    assert "a product and its gradient[bf16]" in failed(ImportableAccelerator(), "capabilities")


@pytest.mark.slow
def test_a_mask_that_is_ignored(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert failed(CountedByRay(), "visibility") == set()
    assert failed(BlindToItsMask(), "visibility") == {"an empty variable hides every device"}
