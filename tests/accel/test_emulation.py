"""The emulated MUSA device. What it changes lasts for a process's life, so each part runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMULATED = Path(__file__).parent / "emulated"

pytestmark = pytest.mark.emulated


def run_python(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MUSA_", "ACCELRL_"))}
    environ = inherited | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def run_checks(name: str, **environment: str) -> None:
    run_python("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(EMULATED / name), **environment)


def test_the_device_does_what_a_device_does():
    run_checks("check_device.py")


def test_copies_come_late_where_that_is_asked_for():
    run_checks("check_async.py", ACCELRL_EMULATE_ASYNC="1")


def test_collectives_of_two_ranks():
    run_checks("check_collectives.py")


def test_process_groups_are_given_back_and_rebuilt():
    run_checks("check_reload.py")


def test_doctor_says_that_it_is_emulated():
    report = json.loads(run_python("-m", "accel", "doctor", "--json", ACCELRL_EMULATE_MUSA="1").stdout)
    musa = next(backend for backend in report["backends"] if backend["name"] == "musa")
    assert (report["selected"], musa["usable"], musa["emulated"], len(musa["devices"])) == ("musa", True, True, 2)
    text = run_python("-m", "accel", "doctor", "--accelerator", "musa", "--emulate").stdout
    assert "musa   usable, emulated" in text
    assert "emulated in host memory" in text


@pytest.mark.parametrize("world_size", [2])
def test_conformance_has_no_failure(world_size):
    command = ["-m", "accel", "conformance", "--accelerator", "musa", "--emulate", "--json"]
    report = json.loads(run_python(*command, "--world-size", str(world_size), check=False).stdout)
    assert [outcome for outcome in report["outcomes"] if outcome["result"] == "FAIL"] == []
    assert report["pass"] > 50


def test_conformance_where_copies_come_late():
    command = ["-m", "accel", "conformance", "--accelerator", "musa", "--emulate"]
    subjects = ["--subject", "numerics", "--subject", "streams", "--subject", "memory"]
    done = run_python(*command, *subjects, check=False, ACCELRL_EMULATE_ASYNC="1")
    assert done.returncode == 0, done.stdout


def test_the_visible_list_is_honoured_and_ids_are_mapped_through_it():
    code = """
from accel import physical_device_id, resolve_visible_device_id, select_accelerator
accelerator = select_accelerator("musa", emulate=True)
accelerator.set_device(resolve_visible_device_id("3"))
print(accelerator.device_count(), accelerator.current_device(), physical_device_id(0))
"""
    seen = run_python("-c", code, MUSA_VISIBLE_DEVICES="3", ACCELRL_EMULATED_DEVICES="4")
    assert seen.stdout.split() == ["1", "0", "3"]


LOADED = "import sys; print(sorted(m for m in sys.modules if 'musa' in m and not m.startswith('accel.backends')))"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_musa_variables_load_nothing_where_another_accelerator_is_chosen(name):
    code = f"""
from accel import AcceleratorError, select_accelerator
import torch
try:
    select_accelerator({name!r})
except AcceleratorError as error:
    assert {name!r} in str(error)
{LOADED}
print(torch._C._get_privateuse1_backend_name())
"""
    variables = {"ACCELRL_EMULATE_MUSA": "1", "ACCELRL_EMULATE_ASYNC": "1", "MUSA_VISIBLE_DEVICES": "0"}
    assert run_python("-c", code, **variables).stdout.split() == ["[]", "privateuseone"]


def test_without_being_asked_for_musa_is_the_hardware():
    done = run_python("-m", "accel", "doctor", "--accelerator", "musa", "--json", check=False)
    assert done.returncode == 1
    assert "torch_musa is not installed" in json.loads(done.stdout)["why"]


def test_a_real_torch_musa_is_never_replaced(tmp_path):
    (tmp_path / "torch_musa.py").write_text("")
    code = 'from accel import select_accelerator; select_accelerator("musa", emulate=True)'
    done = run_python("-c", code, check=False, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert f"a real torch_musa is installed ({tmp_path / 'torch_musa.py'})" in done.stderr


def test_a_torch_musa_that_someone_else_put_into_the_process_is_not_replaced():
    code = """
import sys, types
sys.modules["torch_musa"] = types.ModuleType("torch_musa")
from accel import select_accelerator
select_accelerator("musa", emulate=True)
"""
    assert "a real torch_musa is installed" in run_python("-c", code, check=False).stderr


def test_device_type_taken_by_another_backend_is_an_error():
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
from accel import select_accelerator
select_accelerator("musa", emulate=True)
"""
    assert "gave it to 'other'" in run_python("-c", code, check=False).stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELRL_EMULATE_MUSA", "yes"),
        ("ACCELRL_EMULATED_DEVICES", "17"),
        ("ACCELRL_EMULATED_MEMORY", "80GB"),
        ("ACCELRL_EMULATE_ASYNC", "on"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(variable, value):
    from accel.emulation.settings import EmulationSettings, emulation_asked
    from accel.errors import AcceleratorError

    read = emulation_asked if variable == "ACCELRL_EMULATE_MUSA" else EmulationSettings.from_environment
    with pytest.raises(AcceleratorError, match=f"{variable}='{value}'"):
        read({variable: value})
