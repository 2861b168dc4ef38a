"""What doctor reports: the choice or why there is none, every backend, and contradictions with a fix."""

import json
import os
import subprocess
import sys

from accel.backends.cpu import CpuAccelerator
from accel.doctor.contradictions import find_contradictions
from accel.doctor.diagnosis import diagnose
from accel.doctor.display import render
from tests.accel.fake_backends import ImportableAccelerator, fake, registry_of


def test_it_shows_every_backend_with_its_devices_or_its_reason():
    registry = registry_of(acme=fake("acme", reason="no card"), bolt=fake("bolt", error=OSError("driver broke")))
    diagnosis = diagnose("cpu", registry=registry, environ={})
    backends = {backend.name: backend for backend in diagnosis.backends}
    assert diagnosis.selected == "cpu"
    assert backends["acme"].reason == "no card"
    assert "OSError: driver broke" in backends["bolt"].reason
    assert len(backends["cpu"].devices) == CpuAccelerator().device_count()
    assert backends["cpu"].process_group_backend == "gloo"
    text = render(diagnosis)
    for shown in ("accelerator: cpu", "no card", "driver broke", "megatron-core", "none found"):
        assert shown in text


def test_an_unusable_choice_is_shown_and_not_replaced():
    diagnosis = diagnose("acme", registry=registry_of(acme=fake("acme", reason="no card")), environ={})
    assert diagnosis.selected is None
    assert "no card" in diagnosis.why
    assert "accelerator: NONE" in render(diagnosis)


def test_a_backend_whose_devices_cannot_be_asked_does_not_stop_it():
    class Half(CpuAccelerator):
        name = "half"

        def device_name(self, index):
            raise OSError("firmware")

    diagnosis = diagnose("cpu", registry=registry_of(half=Half), environ={})
    half = next(backend for backend in diagnosis.backends if backend.name == "half")
    assert "asking its devices raised OSError: firmware" in half.reason


def test_a_choice_whose_devices_cannot_be_asked_is_no_choice():
    class Half(CpuAccelerator):
        name = "half"

        def memory_info(self, index=None):
            raise OSError("firmware")

    diagnosis = diagnose("half", registry=registry_of(half=Half), environ={})
    assert diagnosis.selected is None
    assert "asking its devices raised OSError: firmware" in diagnosis.why
    assert "cpu" in {backend.name for backend in diagnosis.backends if backend.usable}


def test_values_that_look_secret_stay_hidden():
    environ = {"ACCELRL_API_KEY": "hunter2", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/root"}
    shown = diagnose("cpu", registry=registry_of(), environ=environ).environment
    assert shown == {"ACCELRL_API_KEY": "(hidden)", "CUDA_VISIBLE_DEVICES": "0"}


def contradictions(environ, loaded=(), chosen="importable"):
    probes = registry_of(importable=ImportableAccelerator).probes()
    return [found.problem for found in find_contradictions(probes, chosen, loaded, environ)]


def test_masks_are_judged_for_the_backend_in_question_alone():
    for chosen, environ, says in [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, "ROCR_VISIBLE_DEVICES=1"),
        ("musa", {"MUSA_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "contradict each other"),
        ("musa", {"MUSA_VISIBLE_DEVICES": "0!"}, "'0!' is no device id"),
    ]:
        for asked in (chosen, None):
            assert any(says in problem for problem in contradictions(environ, chosen=asked)), (environ, asked)
        assert contradictions(environ, chosen="cpu") == []


def test_contradictions_are_found_and_have_a_fix():
    for environ, says in [
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}, "differ"),
        ({"ACCELRL_ACCELERATOR": "cpu", "ACCELRL_ACCELERATOR_SPEC": "musa=a:B@1"}, "disagree"),
        ({"ACCELRL_ACCELERATOR_SPEC": "garbage"}, "'garbage' is no accelerator specification"),
        ({"ACCELRL_CPU_DEVICES": "none"}, "no number of devices"),
        ({"OMP_NUM_THREADS": "4096"}, "usable cores"),
    ]:
        found = contradictions(environ)
        assert any(says in problem for problem in found), (environ, found)
    assert contradictions({}) == []


def test_an_autoloaded_vendor_is_reported_when_the_run_is_on_another():
    assert any("loaded torch_musa" in problem for problem in contradictions({}, loaded={"torch_musa"}))
    assert contradictions({}, loaded={"torch_musa"}, chosen="musa") == []


def accel(*arguments, **environ):
    command = [sys.executable, "-m", "accel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=120)


def test_the_command_prints_json_and_its_status_says_whether_the_choice_is_usable():
    fine = accel("doctor", "--json", "--accelerator", "cpu")
    assert fine.returncode == 0, fine.stderr
    assert json.loads(fine.stdout)["selected"] == "cpu"
    refused = accel("doctor", "--json", ACCELRL_ACCELERATOR="no-such-vendor")
    assert refused.returncode == 1
    report = json.loads(refused.stdout)
    assert report["selected"] is None
    assert "no-such-vendor" in report["why"]
    assert {backend["name"] for backend in report["backends"]} >= {"cpu", "cuda", "musa"}


def test_conformance_of_an_unusable_backend_is_an_error_without_a_traceback():
    refused = accel("conformance", "--accelerator", "no-such-vendor")
    assert refused.returncode == 1
    assert refused.stderr.startswith("accel: error: no accelerator is named 'no-such-vendor'")
