"""The visible-devices variable decides what a new process sees, and ids resolve both ways under it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel import accelerator_spec
from accel.contract import Accelerator
from accel.registry import SPEC_ENV
from accel.visibility import physical_device_id, resolve_visible_device_id

_COUNT = """
from accel import AcceleratorError, get_accelerator
try:
    accelerator = get_accelerator()
    count = accelerator.device_count()
    if count:
        accelerator.set_device(count - 1)
except AcceleratorError as error:
    print("refused:", error)
else:
    print("sees", count)
"""


def test_ids_resolve_both_ways(accelerator: Accelerator) -> None:
    for local in range(accelerator.device_count()):
        assert resolve_visible_device_id(physical_device_id(local, accelerator), accelerator) == local


def test_a_process_sees_only_what_its_variable_lists(accelerator: Accelerator) -> None:
    _needs_a_variable(accelerator)
    there = [physical_device_id(local, accelerator) for local in range(accelerator.device_count())]
    assert _seen(accelerator, there[-1]) == "sees 1"
    if len(there) > 1:
        assert _seen(accelerator, f"{there[-1]},{there[0]}") == "sees 2"


def test_an_empty_variable_hides_every_device(accelerator: Accelerator) -> None:
    _needs_a_variable(accelerator)
    seen = _seen(accelerator, "")
    assert seen == "sees 0" or seen.startswith("refused:"), seen


def _needs_a_variable(accelerator: Accelerator) -> None:
    if accelerator.visible_devices_env is None:
        pytest.skip("needs a visible_devices_env, and the backend declares none")


def _seen(accelerator: Accelerator, visible: str) -> str:
    """What a new process says under this list, in one line."""
    assert accelerator.visible_devices_env is not None
    masks = {accelerator.visible_devices_env, *accelerator.same_masks, *accelerator.lower_masks}
    environment = {name: value for name, value in os.environ.items() if name not in masks}
    environment |= accelerator.worker_env(threads=1)
    environment |= {SPEC_ENV: accelerator_spec(accelerator), accelerator.visible_devices_env: visible}
    command = [sys.executable, "-c", _COUNT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
