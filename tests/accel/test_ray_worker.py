"""A worker stands on the device that Ray assigned, whether Ray narrowed the visible list or was told not to."""

import os

import pytest

from accel import AcceleratorError, Capabilities, accelerator_spec
from accel.placement.requests import needs_device_lease
from tests.accel.fake_backends import CountedByRay, ImportableAccelerator, registry_of


def test_exclusive_devices_that_nothing_tells_apart_are_refused():
    lost = type("Lost", (ImportableAccelerator,), {"visible_devices_env": None})
    with pytest.raises(AcceleratorError, match=r"cannot be used with --launcher ray.*visible_devices_env"):
        needs_device_lease(lost())
    lost.capabilities = Capabilities(exclusive_devices=False)
    assert not needs_device_lease(lost())
    assert needs_device_lease(ImportableAccelerator())
    assert not needs_device_lease(CountedByRay())


def place(spec):
    from accel.placement.ray_worker import take_assigned_device

    accelerator = take_assigned_device(spec)
    return os.environ["CUDA_VISIBLE_DEVICES"], accelerator.current_device()


@pytest.mark.slow
@pytest.mark.parametrize("noset", [False, True], ids=["isolated", "noset"])
def test_ranks_stand_on_different_cards(monkeypatch, noset):
    import ray

    registry = registry_of(counted=CountedByRay)
    spec = accelerator_spec(registry.select("counted").accelerator, registry)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    env = {"PYTHONPATH": os.getcwd()}
    if noset:
        monkeypatch.setenv(CountedByRay.ray_noset_env, "1")
        env[CountedByRay.ray_noset_env] = "1"
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:

        class Rank:
            def place(self, spec):
                return place(spec)

        ranks = [
            ray.remote(Rank).options(num_cpus=0, num_gpus=1, runtime_env={"env_vars": env}).remote() for _ in range(2)
        ]
        places = sorted(ray.get([rank.place.remote(spec) for rank in ranks]))
    finally:
        ray.shutdown()
    assert places == ([("4,5", 0), ("4,5", 1)] if noset else [("4", 0), ("5", 0)])
