"""The ledger on a local cluster: drivers that share it never get one card twice, and the dead give theirs back."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from accel import AcceleratorError
from tests.accel.fake_backends import ImportableAccelerator

pytestmark = pytest.mark.slow

DRIVER = """
    import os, sys, time
    import ray
    from tests.accel.fake_backends import ImportableAccelerator
    from accel import register_accelerator
    from accel.placement.ray_ledger import RayDeviceLeases
    from accel.placement.requests import ray_request, ray_worker_env

    register_accelerator("importable", ImportableAccelerator)
    accelerator = ImportableAccelerator()
    ray.init(address=os.environ["CLUSTER"], log_to_driver=False)
    node = ray.nodes()[0]["NodeID"]
    leases = RayDeviceLeases(accelerator)
    lease = leases.lease(node, 2)

    @ray.remote(num_cpus=0, **ray_request(accelerator, 2))
    class Worker:
        def environment(self):
            return os.environ["IMPORTABLE_VISIBLE_DEVICES"], os.environ["ACCELRL_ACCELERATOR"]

    env = ray_worker_env(accelerator, 1, devices=lease.devices) | {"PYTHONPATH": os.getcwd()}
    worker = Worker.options(runtime_env={"env_vars": env}).remote()
    print(",".join(lease.devices), *ray.get(worker.environment.remote()), flush=True)
    sys.stdin.readline()
    leases.close()
    print("closed", flush=True)
"""


@pytest.fixture
def cluster(monkeypatch):
    """One node with four cards of the custom resource, under a visible list that does not start at 0."""
    import ray

    monkeypatch.setenv("IMPORTABLE_VISIBLE_DEVICES", "4-7")
    context = ray.init(
        address="local",
        num_cpus=2,
        resources={"IMPORTABLE": 4},
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield context.address_info["address"]
    ray.shutdown()


def start_driver(address):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        env=os.environ | {"CLUSTER": address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def leases_of_the_cluster():
    import ray

    from accel.placement.ray_ledger import LEDGER_NAME, NAMESPACE

    return ray.get(ray.get_actor(LEDGER_NAME, namespace=NAMESPACE).leases.remote())


def wait_until(condition, seconds=60):
    import time

    for _ in range(seconds * 10):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("the condition did not come true")


def test_two_drivers_on_one_cluster_never_get_the_same_card(cluster):
    from accel.placement.ray_ledger import RayDeviceLeases

    drivers = [start_driver(cluster), start_driver(cluster)]
    try:
        lines = [driver.stdout.readline().split() for driver in drivers]
        held = [line[0].split(",") for line in lines]
        assert sorted(held[0] + held[1]) == ["4", "5", "6", "7"]
        for devices, visible, name in lines:
            assert visible == devices
            assert name == "importable"

        import ray

        node = ray.nodes()[0]["NodeID"]
        third = RayDeviceLeases(ImportableAccelerator())
        with pytest.raises(AcceleratorError, match=r"0 free IMPORTABLE devices of 4 and the job asks for 1"):
            third.lease(node, 1)

        drivers[0].stdin.write("\n")
        drivers[0].stdin.flush()
        assert drivers[0].stdout.readline() == "closed\n"
        assert sorted(device for lease in leases_of_the_cluster() for device in lease.devices) == sorted(held[1])

        drivers[1].send_signal(signal.SIGKILL)
        drivers[1].wait()
        wait_until(lambda: not leases_of_the_cluster())

        lease = third.lease(node, 4)
        assert sorted(lease.devices) == ["4", "5", "6", "7"]
        restart_ledger()
        assert leases_of_the_cluster() == [lease]
        third.close()
        assert leases_of_the_cluster() == []
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()


def restart_ledger():
    import ray

    from accel.placement.ray_ledger import LEDGER_NAME, NAMESPACE

    ray.kill(ray.get_actor(LEDGER_NAME, namespace=NAMESPACE), no_restart=False)


def holder_process(name):
    """The process of a named actor."""
    import ray

    actor = ray.get_actor(name, namespace="accelrl")
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def test_a_holder_that_is_killed_while_its_driver_lives_gives_nothing_back(cluster):
    import ray

    from accel.placement.ray_ledger import RayDeviceLeases

    node = ray.nodes()[0]["NodeID"]
    leases = RayDeviceLeases(ImportableAccelerator())
    lease = leases.lease(node, 2)
    before = holder_process(lease.holder)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: restarted(lease.holder, before))
    assert leases_of_the_cluster() == [lease]
    restart_ledger()
    assert leases_of_the_cluster() == [lease]
    leases.release(lease)
    assert leases_of_the_cluster() == []
    leases.close()


def restarted(name, before):
    import ray

    try:
        return holder_process(name) != before and ray.get(ray.get_actor(name, namespace="accelrl").leases.remote())
    except ray.exceptions.RayActorError:
        return False


def test_closing_after_the_ledger_and_the_holder_are_gone_raises_nothing(cluster):
    import ray

    from accel.placement.ray_ledger import LEDGER_NAME, NAMESPACE, RayDeviceLeases

    leases = RayDeviceLeases(ImportableAccelerator())
    lease = leases.lease(ray.nodes()[0]["NodeID"], 2)
    ray.kill(ray.get_actor(lease.holder, namespace=NAMESPACE))
    wait_until(lambda: not leases_of_the_cluster())
    leases.release(lease)
    ray.kill(ray.get_actor(LEDGER_NAME, namespace=NAMESPACE))
    leases.close()
