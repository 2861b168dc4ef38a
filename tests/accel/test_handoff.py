"""From driver to worker: a specification that a worker can import, and that it checks."""

import sys
import textwrap

import pytest

from accel import AcceleratorError, accelerator_spec, load_accelerator_spec
from accel.handoff import AcceleratorSpec, adopt_from_environment
from accel.registry import SPEC_ENV
from tests.accel.fake_backends import ImportableAccelerator, fake, registry_of

SOURCE = """
    from accel.backends.cpu import CpuAccelerator
    class Shipped(CpuAccelerator):
        name = "shipped"
"""


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A backend in a loose module, as a job's working directory ships it."""
    path = tmp_path / "shipped_backend.py"
    path.write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("shipped_backend", None)


def test_a_built_in_backend_round_trips():
    driver, worker = registry_of(), registry_of()
    spec = accelerator_spec(driver.select("cpu").accelerator, driver)
    assert spec.startswith("cpu=accel.backends.cpu:CpuAccelerator@")
    assert load_accelerator_spec(spec, worker).name == "cpu"
    assert spec in worker.selected().why


def test_a_backend_registered_in_code_reaches_a_worker_that_never_registered_it():
    driver, worker = registry_of(importable=ImportableAccelerator), registry_of()
    spec = accelerator_spec(driver.select("importable").accelerator, driver)
    assert isinstance(load_accelerator_spec(spec, worker), ImportableAccelerator)
    assert worker.select("importable").accelerator.name == "importable"


def test_a_backend_shipped_with_the_job_is_pinned_by_its_source(shipped):
    driver = registry_of()
    driver.register("shipped", "shipped_backend:Shipped")
    spec = accelerator_spec(driver.select("shipped").accelerator, driver)
    assert "@src-" in spec
    assert load_accelerator_spec(spec, registry_of()).name == "shipped"
    shipped.write_text(shipped.read_text() + "# another version\n")
    with pytest.raises(AcceleratorError, match="install one on every node"):
        load_accelerator_spec(spec, registry_of())


def test_a_factory_that_no_worker_can_import_is_refused_by_the_driver():
    registry = registry_of(acme=fake("acme"))
    with pytest.raises(AcceleratorError, match="top level of an importable module"):
        accelerator_spec(registry.select("acme").accelerator, registry)


def test_a_factory_hidden_behind_another_of_its_name_is_refused(monkeypatch):
    registry = registry_of(importable=ImportableAccelerator)
    accelerator = registry.select("importable").accelerator
    monkeypatch.setattr(sys.modules[ImportableAccelerator.__module__], "ImportableAccelerator", object)
    with pytest.raises(AcceleratorError, match="something else of that name"):
        accelerator_spec(accelerator, registry)


def test_another_version_in_the_worker_is_refused():
    with pytest.raises(AcceleratorError, match=r"at 99\.9, this worker has"):
        load_accelerator_spec("cpu=accel.backends.cpu:CpuAccelerator@99.9", registry_of())


def test_a_backend_without_a_device_in_the_worker_is_refused():
    driver = registry_of()
    spec = accelerator_spec(driver.platform("cuda"), driver)
    if driver.probe("cuda").usable:
        pytest.skip("this machine has the device")
    with pytest.raises(AcceleratorError, match="not usable in this worker"):
        load_accelerator_spec(spec, registry_of())


def test_a_worker_that_decided_otherwise_fails():
    driver, worker = registry_of(importable=ImportableAccelerator), registry_of()
    spec = accelerator_spec(driver.select("importable").accelerator, driver)
    worker.select("cpu")
    with pytest.raises(AcceleratorError, match="runs on 'cpu'"):
        load_accelerator_spec(spec, worker)


@pytest.mark.parametrize("text", ["", "cpu", "cpu=a.b", "cpu=a.b:C", "=a:B@1", "cpu=a:B@", "cpu=a b:C@1"])
def test_a_malformed_specification_says_what_is_expected(text):
    with pytest.raises(AcceleratorError, match="name=module:attribute@version"):
        AcceleratorSpec.parse(text)


def test_a_worker_adopts_what_its_environment_names(monkeypatch):
    registry = registry_of()
    monkeypatch.delenv(SPEC_ENV, raising=False)
    assert adopt_from_environment(registry) is None
    monkeypatch.setenv(SPEC_ENV, accelerator_spec(registry.platform("cpu"), registry))
    assert adopt_from_environment(registry).accelerator.name == "cpu"
