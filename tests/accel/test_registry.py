"""Registering, discovering and probing backends."""

import threading

import pytest

import accel.registry
from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.registry import Registration, Registry
from tests.accel.fake_backends import fake, registry_of


def test_built_in_backends_are_known_without_entry_points():
    assert {"cpu", "cuda", "musa"} <= set(Registry({}, list).registrations())


def test_double_registration_says_how_to_override():
    registry = registry_of(acme=fake("acme"))
    with pytest.raises(AcceleratorError, match=r"already registered by .*override=True"):
        registry.register("acme", fake("acme"))
    registry.register("ACME ", fake("acme", priority=99), override=True)
    assert registry.platform("acme").priority == 99


def test_the_selected_backend_cannot_be_replaced():
    registry = registry_of(acme=fake("acme"))
    registry.select("acme")
    with pytest.raises(AcceleratorError, match="before it is selected"):
        registry.register("acme", fake("acme"), override=True)


@pytest.mark.parametrize("name", ["", "  ", "auto"])
def test_a_name_that_means_something_else_is_refused(name):
    with pytest.raises(AcceleratorError, match="cannot be an accelerator's name"):
        registry_of().register(name, fake("x"))


def test_a_profiler_activity_that_torch_does_not_have_is_refused_with_those_it_has():
    class Misspelt(CpuAccelerator):
        name = "misspelt"
        profiler_activity = "PrivateUse"

    with pytest.raises(
        AcceleratorError, match=r"profiler_activity = 'PrivateUse', expected None or one of CPU, .*PrivateUse1"
    ):
        registry_of(misspelt=Misspelt)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AcceleratorError, match=r"'tpu'.*known: cpu, cuda, musa"):
        registry_of().select("tpu")


def test_an_installed_package_is_found_and_not_imported_before_it_is_asked_for():
    installed = [Registration("acme", "no_such_module:Backend", "acme 1.0")]
    registry = registry_of(installed=installed)
    assert "acme" in registry.registrations()
    assert registry.select("cpu").accelerator.name == "cpu"
    with pytest.raises(AcceleratorError, match="no_such_module") as failure:
        Registry({}, lambda: installed).select("acme")
    assert isinstance(failure.value.__cause__, AcceleratorError)


def test_a_name_that_two_packages_claim_fails_when_it_is_asked_for_and_not_before():
    installed = [Registration("acme", "a:B", "acme-one 1.0"), Registration("acme", "c:D", "acme-two 2.0")]
    assert registry_of(installed=installed).select("cpu").accelerator.name == "cpu"
    with pytest.raises(AcceleratorError, match=r"acme-one 1\.0 and by acme-two 2\.0"):
        registry_of(installed=installed).select("acme")


def test_an_installed_package_does_not_take_a_built_in_name():
    registry = registry_of(installed=[Registration("cpu", "acme:Backend", "acme 1.0")])
    assert isinstance(registry.select("cpu").accelerator, CpuAccelerator)


def test_a_factory_that_makes_something_else_is_refused():
    with pytest.raises(AcceleratorError, match="made a dict"):
        registry_of(acme=dict).select("acme")
    with pytest.raises(AcceleratorError, match="registered as 'acme' but its backend's name is 'other'"):
        registry_of(acme=fake("other")).select("acme")


def test_a_probe_that_raises_is_kept_and_is_the_cause():
    broken = OSError("driver too old")
    registry = registry_of(acme=fake("acme", error=broken))
    probe = registry.probe("acme")
    assert (probe.usable, probe.error) == (False, broken)
    assert "OSError: driver too old" in str(probe.reason)
    with pytest.raises(AcceleratorError, match="driver too old") as failure:
        registry.select("acme")
    assert failure.value.__cause__ is broken


def test_auto_says_what_it_passed_over():
    selection = registry_of(acme=fake("acme", reason="no card"), bolt=fake("bolt", error=OSError("boom"))).select()
    assert selection.accelerator.name == "cpu"
    assert "acme (no card)" in selection.why
    assert "boom" in selection.why
    assert {probe.registration.name for probe in selection.passed_over} >= {"acme", "bolt"}


def test_auto_does_not_probe_what_is_below_the_one_it_takes():
    registry = registry_of(top=fake("top", priority=90), low=fake("low", priority=10, error=OSError("probed")))
    assert registry.select().passed_over == ()


def test_the_decision_is_made_once():
    registry = registry_of(acme=fake("acme", priority=90))
    first = registry.select().accelerator
    assert registry.select().accelerator is first
    assert registry.select("acme").accelerator is first
    with pytest.raises(AcceleratorError, match=r"runs on 'acme' .*asks for cpu"):
        registry.select("cpu")


def test_threads_that_select_at_once_get_one_backend():
    registry = registry_of(acme=fake("acme", priority=90))
    start, chosen = threading.Barrier(8), []

    def select() -> None:
        start.wait()
        chosen.append(registry.select().accelerator)

    threads = [threading.Thread(target=select) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(accelerator) for accelerator in chosen}) == 1


def test_a_driver_without_the_device_can_ask_for_the_platform():
    registry = registry_of(acme=fake("acme", error=OSError("probed")))
    assert registry.platform("acme").train_backend == "gloo"
    assert registry.select("acme", needs_device=False).accelerator.name == "acme"


def test_emulation_of_a_backend_that_has_none_is_refused():
    with pytest.raises(AcceleratorError, match="'cpu' has no emulation"):
        registry_of().select("cpu", emulate=True)
    with pytest.raises(AcceleratorError, match="name it with --accelerator"):
        registry_of().select(emulate=True)


def test_contradictory_masks_stop_a_selection():
    class Masked(CpuAccelerator):
        name = "acme"
        visible_devices_env = "ACME_VISIBLE_DEVICES"
        lower_masks = ("LOWER_VISIBLE_DEVICES",)

    environ = {"ACME_VISIBLE_DEVICES": "0", "LOWER_VISIBLE_DEVICES": "1"}
    with pytest.raises(AcceleratorError, match="unset LOWER_VISIBLE_DEVICES"):
        registry_of(environ, acme=Masked).select("acme")


def test_the_process_functions_share_one_registry(monkeypatch):
    monkeypatch.setattr(accel.registry, "_process", registry_of())
    monkeypatch.delenv(accel.registry.SPEC_ENV, raising=False)
    accel.register_accelerator("acme", fake("acme", priority=80))
    assert accel.available_accelerators()["acme"].usable
    assert accel.select_accelerator("acme") is accel.get_accelerator()
