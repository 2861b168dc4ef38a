"""DeepEP's buffers are made outside the memory saver's region, and the region is left as it was found.

The saver's library is a compiled stand-in that ctypes loads as it loads the real one; the real one's names and the
scope of its flag are checked against its published wheels. miles 3185.
"""

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.memory.deep_ep import install_deep_ep_guard
from tests.accel.memory_saver_cases import (
    SOURCE,
    compile_library,
    deep_ep_package,
    events_of,
    load_stand_in,
    put,
    saver_package,
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    return compile_library(tmp_path_factory.mktemp("saver"), SOURCE, "saver")


@pytest.fixture
def library(compiled):
    loaded = load_stand_in(compiled)
    yield loaded
    loaded.tms_set_interesting_region(False)


class NotingAccelerator(CpuAccelerator):
    """Notes its synchronisation among the library's events."""

    def __init__(self, library):
        self.library = library

    def synchronize(self, index=None):
        self.library.stand_in_note(b"sync")


def start(library, inside):
    library.tms_set_interesting_region(inside)
    library.stand_in_forget()


def noting_init(library):
    def initialise(self, *arguments, **named):
        library.stand_in_note(b"init")
        self.arguments = (arguments, named)

    return initialise


@pytest.mark.parametrize("inside", [True, False])
def test_events_of_success_in_order(monkeypatch, library, inside):
    package = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))
    start(library, inside)
    buffer = package.Buffer("group", 7, low_latency_mode=True)
    assert events_of(library) == ["get", "set-False", "init", "sync", f"set-{inside}"]
    assert library.tms_get_interesting_region() is inside
    assert buffer.arguments == (("group", 7), {"low_latency_mode": True})


@pytest.mark.parametrize("inside", [True, False])
def test_events_of_failure_in_order_and_the_exception_itself(monkeypatch, library, inside):
    failure = RuntimeError("NVSHMEM out of memory")

    def initialise(self):
        library.stand_in_note(b"init")
        raise failure

    package = deep_ep_package(initialise)
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))
    start(library, inside)
    with pytest.raises(RuntimeError) as caught:
        package.Buffer()
    assert caught.value is failure
    assert caught.value.__cause__ is None
    assert events_of(library) == ["get", "set-False", "init", f"set-{inside}"]
    assert library.tms_get_interesting_region() is inside


def test_a_device_error_that_the_synchronisation_brings_up_restores_the_flag(monkeypatch, library):
    class Broken(CpuAccelerator):
        def synchronize(self, index=None):
            raise RuntimeError("illegal memory access")

    package = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(Broken())
    start(library, True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        package.Buffer()
    assert events_of(library) == ["get", "set-False", "init", "set-True"]


def test_applied_twice_it_wraps_once(monkeypatch, library):
    package = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))
    first = package.Buffer.__init__
    install_deep_ep_guard(NotingAccelerator(library))
    assert package.Buffer.__init__ is first
    start(library, True)
    package.Buffer()
    assert events_of(library) == ["get", "set-False", "init", "sync", "set-True"]


def test_applied_from_many_threads_it_wraps_once(monkeypatch, library):
    package = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    threads = [threading.Thread(target=install_deep_ep_guard, args=(NotingAccelerator(library),)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start(library, True)
    package.Buffer()
    assert events_of(library).count("get") == 1


def test_the_original_keeps_its_name_and_signature(monkeypatch):
    def __init__(self, group, num_nvl_bytes=0):
        """Makes a buffer."""

    package = deep_ep_package(__init__)
    put(monkeypatch, deep_ep=package)
    install_deep_ep_guard(CpuAccelerator())
    assert package.Buffer.__init__.__doc__ == "Makes a buffer."
    assert package.Buffer.__init__.__wrapped__ is __init__


@pytest.mark.parametrize("package", [None, saver_package(None)], ids=["not imported", "not in use"])
def test_without_an_active_saver_it_is_a_plain_call(monkeypatch, library, package):
    buffers = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=buffers, torch_memory_saver=package)
    install_deep_ep_guard(NotingAccelerator(library))
    buffers.Buffer(1)
    assert events_of(library) == ["init"]
    if package is None:
        assert "torch_memory_saver" not in sys.modules


def test_a_saver_that_becomes_active_later_is_noticed(monkeypatch, library):
    buffers = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=buffers, torch_memory_saver=None)
    install_deep_ep_guard(NotingAccelerator(library))
    put(monkeypatch, torch_memory_saver=saver_package(library))
    start(library, True)
    buffers.Buffer()
    assert events_of(library) == ["get", "set-False", "init", "sync", "set-True"]


def test_a_saver_without_the_getter_is_named_at_the_first_guarded_call(monkeypatch, tmp_path):
    old = load_stand_in(compile_library(tmp_path, SOURCE, "saver_0_0_8", "-DVERSION_0_0_8"))
    made = []
    buffers = deep_ep_package(lambda self: made.append(self))
    put(monkeypatch, deep_ep=buffers, torch_memory_saver=saver_package(old))
    install_deep_ep_guard(CpuAccelerator())
    with pytest.raises(AcceleratorError, match=r"tms_get_interesting_region.*0\.0\.9 or newer is needed"):
        buffers.Buffer()
    assert made == []
    put(monkeypatch, torch_memory_saver=saver_package(None))
    buffers.Buffer()
    assert len(made) == 1


def test_a_missing_deep_ep_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(AcceleratorError, match="deep_ep cannot be imported"):
        install_deep_ep_guard(CpuAccelerator())


def test_a_module_of_that_name_without_buffers_is_named(monkeypatch):
    package = deep_ep_package(lambda self: None)
    del package.Buffer
    package.__file__ = "/site-packages/deep_ep/__init__.py"
    put(monkeypatch, deep_ep=package)
    with pytest.raises(AcceleratorError, match=r"deep_ep/__init__.py has none of Buffer, ElasticBuffer"):
        install_deep_ep_guard(CpuAccelerator())


def test_a_buffer_made_within_another_leaves_the_flag_to_the_outer_one(monkeypatch, library):
    """DeepEP 2's ElasticBuffer beside Buffer; one makes the other here."""
    package = deep_ep_package(noting_init(library))

    def outer(self):
        library.stand_in_note(b"outer")
        self.inner = package.Buffer()
        library.stand_in_note(b"outer")

    package.ElasticBuffer = type("ElasticBuffer", (), {"__init__": outer})
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))
    start(library, True)
    package.ElasticBuffer()
    inner = ["get", "set-False", "init", "sync", "set-False"]
    assert events_of(library) == ["get", "set-False", "outer", *inner, "outer", "sync", "set-True"]


def test_a_class_that_inherits_the_guarded_init_is_not_guarded_again(monkeypatch, library):
    package = deep_ep_package(noting_init(library))
    package.ElasticBuffer = type("ElasticBuffer", (package.Buffer,), {})
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))
    start(library, True)
    package.ElasticBuffer()
    assert events_of(library).count("get") == 1


def test_threads_inside_and_outside_the_region_do_not_meet(monkeypatch, library):
    """Both wait inside ``__init__`` for each other, as ranks' threads do: no lock may be held there."""
    both = threading.Barrier(2, timeout=30)
    seen = {}

    def initialise(self, name):
        both.wait()
        seen[name] = library.tms_get_interesting_region()
        both.wait()

    package = deep_ep_package(initialise)
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard(NotingAccelerator(library))

    def make(name, inside):
        library.tms_set_interesting_region(inside)
        package.Buffer(name)
        seen[name, "after"] = library.tms_get_interesting_region()

    threads = [threading.Thread(target=make, args=("inside", True)), threading.Thread(target=make, args=("out", False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"inside": False, "out": False, ("inside", "after"): True, ("out", "after"): False}


def test_the_selected_accelerator_is_synchronised_where_none_is_given(monkeypatch, library):
    monkeypatch.setattr("accel.memory.deep_ep.get_accelerator", lambda: NotingAccelerator(library))
    package = deep_ep_package(noting_init(library))
    put(monkeypatch, deep_ep=package, torch_memory_saver=saver_package(library))
    install_deep_ep_guard()
    package.Buffer()
    assert events_of(library) == ["get", "set-False", "init", "sync", "set-False"]


WITH_THE_REAL_PACKAGE = """
import sys, threading
from types import ModuleType
import torch_memory_saver
from torch_memory_saver import binary_wrapper, entrypoint
from accel.backends.cpu import CpuAccelerator
from accel.memory.deep_ep import install_deep_ep_guard

deep_ep = sys.modules["deep_ep"] = ModuleType("deep_ep")
seen = []
deep_ep.Buffer = type("Buffer", (), {"__init__": lambda self: seen.append(library and flag())})
install_deep_ep_guard(CpuAccelerator())
saver = torch_memory_saver.torch_memory_saver
library = None
assert saver._impl is None
deep_ep.Buffer()

implementation = object.__new__(entrypoint._TorchMemorySaverImpl)  # its constructor wants a CUDA memory pool
implementation._binary_wrapper = binary_wrapper.BinaryWrapper(path_binary=sys.argv[1])
saver._impl = implementation
library = implementation._binary_wrapper.cdll
flag = library.tms_get_interesting_region
for inside in (False, True):
    library.tms_set_interesting_region(inside)
    deep_ep.Buffer()
    seen.append(flag())
thread = threading.Thread(target=lambda: seen.append(flag()))
thread.start()
thread.join()
print(seen)
"""

WITH_THE_REAL_0_0_8 = """
import sys
from types import ModuleType
import torch_memory_saver
from accel.backends.cpu import CpuAccelerator
from accel.memory.deep_ep import install_deep_ep_guard

deep_ep = sys.modules["deep_ep"] = ModuleType("deep_ep")
deep_ep.Buffer = type("Buffer", (), {"__init__": lambda self: None})
install_deep_ep_guard(CpuAccelerator())
try:
    deep_ep.Buffer()
except Exception as error:
    print(type(error).__name__, error)
"""


def unpacked_wheel(version, folder) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"torch-memory-saver=={version}"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        pytest.skip(f"torch-memory-saver {version} cannot be downloaded here: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / "package")
    return folder / "package"


def absent_drivers(libraries, folder) -> Path:
    """The vendor's driver libraries, for a machine without them: every function that these need, and none works."""
    names = set()
    for library in libraries:
        listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True)
        if listed.returncode != 0:
            pytest.skip(f"nm cannot list what {library.name} needs: {listed.stderr}")
        words = [line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()]
        names |= {word for word in words if word.startswith("cu")}
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names))
    for soname in ("libcuda.so.1", "libcudart.so.12"):
        compile_library(folder, source, soname, f"-Wl,-soname,{soname}").rename(folder / soname)
    return folder


def run_beside(package, code, *arguments, **environment):
    path = f"{package}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.0.9", "0.0.10"])
def test_the_real_package_has_these_names_and_a_flag_for_each_thread(tmp_path, version):
    (tmp_path / "drivers").mkdir()
    package = unpacked_wheel(version, tmp_path)
    library = package / "torch_memory_saver_hook_mode_torch.abi3.so"
    drivers = absent_drivers([library], tmp_path / "drivers")
    seen = run_beside(package, WITH_THE_REAL_PACKAGE, str(library), LD_LIBRARY_PATH=str(drivers))
    # No library; then outside the region and in it: the flag within __init__ and after; then another thread's flag.
    assert seen == str([None, False, False, False, True, False])


@pytest.mark.slow
def test_the_real_0_0_8_is_refused_by_its_version(tmp_path):
    package = unpacked_wheel("0.0.8", tmp_path)
    says = run_beside(package, WITH_THE_REAL_0_0_8)
    assert says.startswith("AcceleratorError torch_memory_saver 0.0.8 cannot tell")
    assert "0.0.9 or newer" in says
