"""What Ray is asked for, and the environment that a worker starts with."""

import pytest

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.backends.cuda import CudaAccelerator
from accel.backends.musa import MusaAccelerator
from accel.placement.requests import needs_device_lease, ray_bundle, ray_node_options, ray_request, ray_worker_env
from tests.accel.fake_backends import ImportableAccelerator

CPU, CUDA, MUSA = CpuAccelerator(), CudaAccelerator(), MusaAccelerator()


def test_cuda_asks_for_num_gpus_and_others_for_their_resource():
    assert ray_request(CUDA, 2) == {"num_gpus": 2}
    assert ray_request(MUSA, 2) == {"resources": {"MUSA": 2}}
    assert ray_request(CPU, 1) == {"resources": {"accelrl_cpu": 1}}
    assert ray_request(MUSA, 0.5) == {"resources": {"MUSA": 0.5}}
    assert ray_request(MUSA, 0) == {"resources": {"MUSA": 0}}
    assert ray_node_options(MUSA, 8) == {"resources": {"MUSA": 8}}
    assert ray_bundle(MUSA, 1) == {"CPU": 1, "MUSA": 1}
    assert ray_bundle(CUDA, 1, cpus=0) == {"GPU": 1}


@pytest.mark.parametrize("amount", [-1, 1.5, float("nan"), float("inf"), True])
def test_an_amount_that_ray_cannot_give_is_refused(amount):
    with pytest.raises(AcceleratorError, match="ask for 0, a fraction below 1, or a whole number"):
        ray_request(MUSA, amount)


def test_only_exclusive_devices_without_rays_isolation_need_a_lease():
    assert [needs_device_lease(a) for a in (CPU, CUDA, MUSA)] == [False, False, True]


def test_leased_devices_are_the_workers_visible_list_and_no_other_mask_contradicts_it():
    env = ray_worker_env(ImportableAccelerator(), 1, devices=["6", "4"], environ={})
    assert env["IMPORTABLE_VISIBLE_DEVICES"] == "6,4"
    assert env["OTHER_VISIBLE_DEVICES"] == env["LOWER_VISIBLE_DEVICES"] == ""
    assert env["RAY_EXPERIMENTAL_NOSET_IMPORTABLE_VISIBLE_DEVICES"] == "1"
    assert env["ACCELRL_ACCELERATOR"] == "importable"
    assert env["ACCELRL_ACCELERATOR_SPEC"].startswith("importable=tests.accel.fake_backends:ImportableAccelerator@")


def test_a_backend_without_a_mask_cannot_be_given_devices():
    with pytest.raises(AcceleratorError, match="no visible-devices variable"):
        ray_worker_env(CPU, 1, devices=["0"])


def test_loopback_calls_stay_off_http_proxies():
    proxied = {"https_proxy": "http://proxy:3128", "no_proxy": "internal.example,localhost"}
    env = ray_worker_env(CPU, 1, environ=proxied)
    assert env["no_proxy"] == env["NO_PROXY"] == "internal.example,localhost,127.0.0.1,::1"
    assert "no_proxy" not in ray_worker_env(CPU, 1, environ={})


def test_per_node_variables_are_not_broadcast(monkeypatch):
    monkeypatch.setattr(
        ImportableAccelerator, "worker_env", lambda self, threads: {"IMPORTABLE_SOCKET_IFNAME": "eth9", "A": "1"}
    )
    env = ray_worker_env(ImportableAccelerator(), 1, environ={})
    assert "IMPORTABLE_SOCKET_IFNAME" not in env
    assert env["A"] == "1"
