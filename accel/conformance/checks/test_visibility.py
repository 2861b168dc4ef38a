"""The visible-devices variable decides what a new process sees, and ids resolve both ways under it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from accel import accelerator_spec
from accel.contract import Accelerator
from accel.registry import SPEC_ENV
from accel.visibility import physical_device_id, resolve_visible_device_id

_COUNT = "from accel import get_accelerator as g; a = g(); a.set_device(0); print(a.device_count())"


def test_ids_resolve_both_ways(accelerator: Accelerator) -> None:
    for local in range(accelerator.device_count()):
        assert resolve_visible_device_id(physical_device_id(local, accelerator), accelerator) == local


def test_a_process_sees_only_what_its_variable_lists(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = accelerator.visible_devices_env
    if variable is None:
        pytest.skip("needs a visible_devices_env, and the backend declares none")
    last = physical_device_id(accelerator.device_count() - 1, accelerator)
    environment = accelerator.worker_env(threads=1) | {variable: last, SPEC_ENV: accelerator_spec(accelerator)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=120, check=False)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.split()[-1] == "1"
