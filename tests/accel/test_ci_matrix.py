"""The list of CI jobs, and what is generated from it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    import matrix

    return matrix.load()


def test_every_backend_has_a_job(jobs):
    assert {"cpu", "musa-emulated", "cuda", "musa"} <= set(jobs)
    assert jobs["cuda"].needs_hardware
    assert not jobs["musa-emulated"].needs_hardware


def test_the_workflow_is_what_the_matrix_says(jobs):
    done = subprocess.run([sys.executable, str(CI / "workflow.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert list(workflow["jobs"]) == list(jobs)
    for name, job in workflow["jobs"].items():
        assert job["steps"][-1]["run"].endswith(f"ci/run_job.py {name}")
        assert ("if" in job) == jobs[name].needs_hardware


def test_an_unknown_job_is_named_and_a_failing_command_fails_the_job(jobs, tmp_path):
    done = subprocess.run([sys.executable, str(CI / "run_job.py"), "npu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no job is named 'npu'" in done.stderr
    import matrix
    import run_job

    assert run_job.run(matrix.Job("x", "cpu", "none", ["exit 3", "touch never"])) == 3


def test_every_exception_of_the_sweep_has_a_reason():
    exceptions = tomllib.loads((CI / "operator_exceptions.toml").read_text())["exceptions"]
    assert all(len(reason) > 20 for reason in exceptions.values())


def test_the_cuda_check_says_what_it_could_not_run(tmp_path):
    """An interpreter without any of the packages: nothing runs, nothing fails silently."""
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    command = ["bash", str(CI / "cuda_check.sh"), str(tmp_path / "out")]
    environment = {"PYTHON": str(bare), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("NOT RUN")]
    assert len(lines) == 11
    assert any("example: lacks torch megatron transformers" in line for line in lines)
    assert any("example-ray: lacks torch megatron transformers ray" in line for line in lines)
    assert any("memory-saver: lacks torch torch_memory_saver" in line for line in lines)
    assert any("group-reload: lacks torch" in line for line in lines)


def test_every_check_of_the_matrix_stands_in_the_cuda_script():
    text = (CI / "cuda_check.sh").read_text()
    for name in ("conformance", "example", "resume", "decode-benchmark", "step-benchmark", "memory-saver", "colocated"):
        assert f" {name} " in text, name
