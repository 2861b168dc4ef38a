"""SGLang engines on the nodes of a Ray cluster: two nodes of this machine, neither of which has room for the run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rollout.sglang_cases import MARKS

pytestmark = [*MARKS, pytest.mark.nightly]  # two servers and two Ray nodes


@pytest.fixture
def two_nodes(monkeypatch):
    """The address of a cluster with two places on one node and one on another."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    cluster.add_node(num_cpus=0, resources={"accelrl_cpu": 2})
    cluster.add_node(num_cpus=0, resources={"accelrl_cpu": 1})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize("channel", ["distributed", "tensor"])
def test_engines_are_started_where_ray_has_places_and_get_the_trainers_weights(channel, two_nodes, tmp_path):
    """One rank trains and two engines answer: three places."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "train", "--accelerator", "cpu", "--ray-address", two_nodes]
    command += ["--rollout-engine", "sglang", "--rollout-num-gpus", "2", "--weight-update-channel", channel]
    command += ["--num-rollout", "3", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"]
    command += ["--global-batch-size", "64", "--progress", "plain", "--output-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-4
    logs = {path.name for path in (run_dir / "servers").iterdir()}
    assert {"actor-0-regular-0.log", "actor-0-regular-1.log", "router-actor.log"} <= logs
