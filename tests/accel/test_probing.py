"""A vendor's code that hangs, prints, leaves the process or declares too little does not take the job along."""

import os
import sys
import textwrap
import threading
import time

import pytest

from accel import AcceleratorError, Capabilities
from accel.backends.cpu import CpuAccelerator
from accel.contract import Accelerator
from accel.probing import PROBE_TIMEOUT_ENV, probe_timeout
from accel.registration import Registration
from accel.registry import Registry
from tests.accel.fake_backends import fake, registry_of

release = threading.Event()


def backend(**methods) -> type[CpuAccelerator]:
    return type("Acme", (CpuAccelerator,), {"name": "acme", **methods})


def test_a_probe_that_hangs_is_given_up_and_recorded():
    hangs = backend(prepare=lambda self: release.wait(60) and None)
    registry = registry_of({PROBE_TIMEOUT_ENV: "0.2"}, acme=hangs)
    try:
        assert "did not answer within 0.2 s" in registry.probe("acme").reason
        assert registry.select().accelerator.name == "cpu"
    finally:
        release.set()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_time_limit_that_cannot_be_is_refused(value):
    with pytest.raises(AcceleratorError, match="number of seconds above 0"):
        probe_timeout(value)


def leave(self):
    sys.exit(3)


def test_a_probe_that_leaves_the_process_is_recorded():
    probe = registry_of(acme=backend(unavailable_reason=leave)).probe("acme")
    assert "SystemExit: 3" in probe.reason


def chatter(self):
    print("vendor banner")
    os.write(1, b"from a library in C\n")


def test_what_a_probe_prints_goes_to_standard_error(capfd):
    assert registry_of(acme=backend(unavailable_reason=chatter)).probe("acme").usable
    out, err = capfd.readouterr()
    assert out == ""
    assert "vendor banner" in err
    assert "from a library in C" in err


def test_an_explicit_choice_makes_and_probes_no_other():
    asked = []
    others = {name: lambda name=name: asked.append(name) for name in ("bolt", "cuda", "musa")}
    assert registry_of(acme=fake("acme"), **others).select("acme").accelerator.name == "acme"
    assert asked == []


def test_a_module_that_registers_another_backend_while_it_is_probed_does_not_deadlock():
    registry = registry_of({PROBE_TIMEOUT_ENV: "20"})

    def prepare(self):
        registry.register("bolt", fake("bolt", reason="no card"))

    registry.register("acme", backend(prepare=prepare))
    assert registry.probe("acme").usable
    assert registry.probe("bolt").reason == "no card"


class Partial(Accelerator):
    """Every method, and not every fact."""

    name = "acme"
    device_type = "cpu"
    ray_resource = "ACME"
    visible_devices_env = None


FACTS = {
    "ray_noset_env": None,
    "train_backend": "gloo",
    "weight_update_backend": "gloo",
    "capabilities": Capabilities(),
    "__abstractmethods__": frozenset(),
}


@pytest.mark.parametrize("missing", ["ray_noset_env", "train_backend", "weight_update_backend", "capabilities"])
def test_a_class_that_lacks_a_fact_is_refused_at_registration_by_the_facts_name(missing):
    facts = {name: value for name, value in FACTS.items() if name != missing}
    with pytest.raises(AcceleratorError, match=f"does not declare {missing}"):
        Registry({}, list).register("acme", type("Acme", (Partial,), facts))


@pytest.mark.parametrize(
    ("fact", "value"), [("train_backend", ""), ("capabilities", {"bf16": True}), ("priority", "9")]
)
def test_a_fact_of_the_wrong_kind_is_refused(fact, value):
    with pytest.raises(AcceleratorError, match=fact):
        Registry({}, list).register("acme", type("Acme", (CpuAccelerator,), {"name": "acme", fact: value}))


class Concrete(Partial):
    """Can be made, and lacks facts."""


Concrete.__abstractmethods__ = frozenset()


def test_an_incomplete_backend_of_a_package_is_shown_and_stops_nobody():
    registry = registry_of(acme=lambda: Partial(), bolt=lambda: Concrete())
    reasons = {probe.registration.name: probe.reason for probe in registry.probes()}
    assert "TypeError" in reasons["acme"]
    assert "does not declare ray_noset_env" in reasons["bolt"]
    assert registry.select().accelerator.name == "cpu"


@pytest.mark.parametrize("name", ["Ac me", "acme!", "1acme", "module:Backend", "ac.me"])
def test_a_name_that_no_flag_could_carry_is_refused(name):
    with pytest.raises(AcceleratorError, match="cannot be an accelerator's name"):
        registry_of().register(name, fake("acme"))


@pytest.mark.parametrize("factory", [None, 7, "nocolon", "a:b:c", ""])
def test_a_factory_that_cannot_be_one_is_refused(factory):
    with pytest.raises(AcceleratorError, match="factory"):
        registry_of().register("acme", factory)


def test_an_entry_point_that_is_wrong_is_shown_and_stops_nobody(monkeypatch):
    from importlib import metadata

    import accel.registry

    points = [
        metadata.EntryPoint("bad name", "acme:Backend", accel.registry.ENTRY_POINT_GROUP),
        metadata.EntryPoint("auto", "acme:Backend", accel.registry.ENTRY_POINT_GROUP),
        metadata.EntryPoint("bolt", "only_a_module", accel.registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(accel.registry.metadata, "entry_points", lambda group: points)
    registry = Registry({})
    assert registry.select("cpu").accelerator.name == "cpu"
    reasons = {probe.registration.name: probe.reason for probe in Registry({}).probes()}
    assert "cannot be an accelerator's name" in reasons["bad name"]
    assert "not written as module:attribute" in reasons["bolt"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a loose module that can be imported; gives its "module:Backend"."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(source: str) -> str:
        name = f"loose_backend_{time.monotonic_ns()}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        names.append(name)
        return f"{name}:Backend"

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("line", ["raise RuntimeError('driver')", "1 +", "import sys; sys.exit(1)"])
def test_a_module_that_fails_to_import_is_an_error_with_its_cause(module, line):
    target = module(line)
    with pytest.raises(AcceleratorError, match="cannot load") as failure:
        Registration("acme", target, "acme 1.0").make()
    assert failure.value.__cause__ is not None


def test_a_target_registers_and_selects(module):
    target = module("""
        from accel.backends.cpu import CpuAccelerator
        class Backend(CpuAccelerator):
            name = "loose"
    """)
    registry = registry_of()
    assert registry.select(target).accelerator.name == "loose"
    assert registry.select("loose") is registry.select(target)
    assert registry.registrations()["loose"].target == target
    with pytest.raises(AcceleratorError, match="already registered"):
        registry_of(loose=fake("loose")).select(target)


def test_a_forked_child_can_select_while_the_parent_was_selecting():
    registry = registry_of(acme=fake("acme"))
    os_lock, done = threading.Event(), threading.Event()

    def hold():
        with registry._deciding, registry._lock:
            os_lock.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    os_lock.wait(20)
    try:
        registry.renew_locks()  # what a forked child does
        assert registry.select("acme").accelerator.name == "acme"
    finally:
        done.set()
        thread.join()
