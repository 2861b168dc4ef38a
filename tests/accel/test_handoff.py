"""From driver to worker: a specification that a worker can import, and that it checks."""

import importlib
import sys
import textwrap
from importlib import metadata

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


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """``use(node, files)`` writes files on one of two nodes, and they are from then on those that are found."""
    paths = {"driver": tmp_path / "driver", "worker": tmp_path / "worker"}
    before = list(sys.path)

    def use(node, files):
        for name, text in files.items():
            path = paths[node] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.setattr(sys, "path", [str(paths[node]), *before])
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.startswith("job_")]:
            del sys.modules[name]

    yield use
    for name in [name for name in sys.modules if name.startswith("job_")]:
        del sys.modules[name]


def handed_over(register):
    """The specification of a backend that ``register`` adds to the driver's registry."""
    driver = registry_of()
    register(driver)
    return accelerator_spec(driver.select("shipped").accelerator, driver)


def in_code(driver):
    driver.register("shipped", importlib.import_module("job_backend").Shipped)


def by_target(driver):
    driver.select("job_backend:Shipped")


WAYS = pytest.mark.parametrize("register", [in_code, by_target])


@WAYS
def test_equal_code_on_another_node_is_accepted_wherever_it_lies(two_nodes, register):
    two_nodes("driver", {"job_backend.py": SOURCE})
    spec = handed_over(register)
    two_nodes("worker", {"job_backend.py": SOURCE})
    assert load_accelerator_spec(spec, registry_of()).name == "shipped"


@WAYS
def test_other_code_on_another_node_is_found(two_nodes, register):
    two_nodes("driver", {"job_backend.py": SOURCE})
    spec = handed_over(register)
    two_nodes("worker", {"job_backend.py": SOURCE + "        priority = 60\n"})
    with pytest.raises(
        AcceleratorError, match=r"the driver runs job_backend:Shipped at src-\w{16}, this worker has src-"
    ):
        load_accelerator_spec(spec, registry_of())


def test_another_file_of_the_package_that_a_backend_is_in_is_found(two_nodes):
    files = {"job_vendor/__init__.py": "", "job_vendor/backend.py": SOURCE, "job_vendor/kernels.py": "FAST = True\n"}
    two_nodes("driver", files)
    spec = handed_over(lambda driver: driver.select("job_vendor.backend:Shipped"))
    two_nodes("worker", files)
    assert load_accelerator_spec(spec, registry_of()).name == "shipped"
    two_nodes("worker", files | {"job_vendor/kernels.py": "FAST = False\n"})
    with pytest.raises(AcceleratorError, match="install one on every node"):
        load_accelerator_spec(spec, registry_of())


def test_an_installed_package_is_pinned_by_version_and_code():
    """A checkout keeps its version whatever is edited in it."""
    driver = registry_of()
    spec = accelerator_spec(driver.select("cpu").accelerator, driver)
    installed, _, digest = AcceleratorSpec.parse(spec).version.partition("+src-")
    assert installed == metadata.version("accelrl")
    assert len(digest) == 16
    with pytest.raises(AcceleratorError, match="this worker has"):
        load_accelerator_spec(spec.replace(digest, "0" * 16), registry_of())


def test_a_backend_in_a_namespace_package_is_pinned_by_its_own_part(two_nodes):
    files = {"job_space/vendor/__init__.py": "", "job_space/vendor/backend.py": SOURCE}
    two_nodes("driver", files)
    spec = handed_over(lambda driver: driver.select("job_space.vendor.backend:Shipped"))
    two_nodes("worker", files | {"job_space/stranger.py": "OTHER = 1\n"})
    assert load_accelerator_spec(spec, registry_of()).name == "shipped"


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
