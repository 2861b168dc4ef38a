"""What Ray is asked for is something that Ray takes."""

from __future__ import annotations

import pytest

from accel.contract import Accelerator
from accel.placement.requests import RAY_GPU, needs_device_lease, ray_request, ray_worker_env
from accel.registry import SPEC_ENV


@pytest.mark.parametrize("amount", [0, 0.5, 1, 2])
def test_ray_takes_the_request(accelerator: Accelerator, amount: float) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    request = ray_request(accelerator, amount)
    assert ("num_gpus" in request) == (accelerator.ray_resource == RAY_GPU)
    ray.remote(num_cpus=0, **request)(lambda: None).options(**request)


def test_workers_are_told_the_accelerator_before_they_start(accelerator: Accelerator) -> None:
    environment = ray_worker_env(accelerator, threads=1)
    assert environment[SPEC_ENV].startswith(f"{accelerator.name}=")
    assert all(isinstance(value, str) for value in environment.values())


def test_workers_are_told_their_threads_and_load_no_other_vendor(accelerator: Accelerator) -> None:
    environment = accelerator.worker_env(threads=3)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in environment.items())
    assert environment.get("OMP_NUM_THREADS") == "3"
    if accelerator.torch_plugin is None:
        assert environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"


def test_leased_devices_become_the_visible_list(accelerator: Accelerator) -> None:
    if not needs_device_lease(accelerator):
        pytest.skip("needs exclusive_devices outside Ray's own GPU resource")
    assert accelerator.visible_devices_env is not None
    assert ray_worker_env(accelerator, 1, devices=["3", "1"])[accelerator.visible_devices_env] == "3,1"
