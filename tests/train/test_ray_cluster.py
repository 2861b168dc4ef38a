"""Jobs on a Ray cluster that is there already: joined by address, side by side, and handed over with ray job submit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.deploy.ports import PortLease

pytestmark = pytest.mark.nightly  # a cluster and several runs, a minute of processor time

DEVICES = 4
JOB_SERVER = all(importlib.util.find_spec(name) for name in ("aiohttp_cors", "opencensus", "prometheus_client"))


@dataclass
class Cluster:
    address: str
    job_server: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def cluster():
    """One node as a person starts it; it ends by the signal that ends ``ray start --block``."""
    ports, directory = PortLease(), Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    port, dashboard = ports.take(), ports.take()
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # what others have of the machine's memory is no fault of ours
    words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "0"]
    words += ["--resources", json.dumps({"accelrl_cpu": DEVICES}), "--temp-dir", str(directory / "r")]
    words += ["--include-dashboard", str(JOB_SERVER).lower(), "--dashboard-port", str(dashboard)]
    with (directory / "ray.log").open("w") as log:
        node = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while "block" not in (directory / "ray.log").read_text():
            assert node.poll() is None, (directory / "ray.log").read_text()
            assert time.monotonic() < deadline, (directory / "ray.log").read_text()
            time.sleep(0.2)
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    finally:
        node.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(30)
        ports.close()
        shutil.rmtree(directory, ignore_errors=True)


def train(address, run_dir, *flags):
    command = [sys.executable, "-m", "train", "--accelerator", "cpu", "--ray-address", address, "--progress", "plain"]
    command += ["--num-rollout", "2", "--rollout-batch-size", "8", "--lr-warmup-iters", "0"]
    return [*command, "--rollout-threads", "1", "--output-dir", str(run_dir), *flags]


def steps(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(step):
    return {key: value for key, value in step.items() if not key.startswith("perf/")}


def test_two_jobs_share_a_cluster_without_touching_each_other(cluster, tmp_path):
    runs = {
        name: subprocess.Popen(
            train(cluster.address, tmp_path / name, "--actor-num-gpus-per-node", "2", "--seed", "3"),
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("one", "two")
    }
    said = {name: run.communicate(timeout=900)[0] for name, run in runs.items()}
    assert {name: run.returncode for name, run in runs.items()} == {"one": 0, "two": 0}, said
    assert [without_times(step) for step in steps(tmp_path / "one")] == [
        without_times(step) for step in steps(tmp_path / "two")
    ]


def test_a_job_that_the_cluster_has_no_devices_for_is_refused_and_the_cluster_goes_on(cluster, tmp_path):
    flags = ("--actor-num-gpus-per-node", str(DEVICES + 1))
    done = subprocess.run(
        train(cluster.address, tmp_path / "big", *flags),
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert "the job needs 5 cpu device(s)" in done.stderr
    assert "the Ray cluster has 4" in done.stderr


@pytest.mark.skipif(not JOB_SERVER, reason="no ray[default] here, whose job server takes submitted jobs")
def test_a_run_can_be_submitted_as_a_job(cluster, tmp_path):
    words = ["job", "submit", "--address", cluster.job_server, "--", *train("auto", tmp_path / "job")]
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run directory" in done.stdout
    assert len(steps(tmp_path / "job")) == 2
