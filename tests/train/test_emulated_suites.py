"""Every layout of trainer ranks on the emulated MUSA device: the tests of the host, on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_MUSA = {"ACCELRL_ACCELERATOR": "musa", "ACCELRL_EMULATE_MUSA": "1"}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("files", "markers"),
    [
        (["tests/train/test_trainer_ranks.py"], "slow and not nightly"),
        (["tests/train/test_weight_channels.py"], "slow and not nightly"),
        (sorted(str(path) for path in (ROOT / "tests" / "rollout").glob("test_torch_engine_*.py")), "not slow"),
    ],
    ids=["trainer ranks", "weight channels", "engine"],
)
def test_what_holds_on_the_host_holds_on_the_device(files, markers):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, *files]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ON_MUSA, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
