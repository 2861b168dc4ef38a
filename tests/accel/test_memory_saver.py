"""The memory saver is checked together with its environment before any worker starts."""

import sys

import pytest

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.backends.cuda import CudaAccelerator
from accel.backends.musa import MusaAccelerator
from accel.memory.saver import active_memory_saver, memory_saver_env, memory_saver_problem

CUDA = CudaAccelerator()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package laid out as torch_memory_saver's wheel is onto the path."""

    def install_version(version: str, library: bool = True):
        package = tmp_path / "torch_memory_saver"
        package.mkdir()
        (package / "__init__.py").write_text("torch_memory_saver = 'the saver'\n")
        metadata = tmp_path / f"torch_memory_saver-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_memory_saver\nVersion: {version}\n")
        if library:
            (tmp_path / "torch_memory_saver_hook_mode_preload.abi3.so").touch()
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield install_version
    sys.modules.pop("torch_memory_saver", None)


def test_workers_get_the_library_preloaded_before_others(install):
    path = install("0.0.10")
    env = memory_saver_env(CUDA, {"LD_PRELOAD": "/lib/jemalloc.so"})
    assert env == {"LD_PRELOAD": f"{path}/torch_memory_saver_hook_mode_preload.abi3.so:/lib/jemalloc.so"}
    assert memory_saver_env(CUDA, env) == env


def test_a_version_that_takes_all_of_ld_preload_for_its_path_is_refused_beside_others(install):
    install("0.0.9")
    with pytest.raises(AcceleratorError, match=r"0\.0\.9 cannot share LD_PRELOAD with /lib/jemalloc\.so"):
        memory_saver_env(CUDA, {"LD_PRELOAD": "/lib/jemalloc.so"})
    assert memory_saver_problem(CUDA, memory_saver_env(CUDA, {})) is None


@pytest.mark.parametrize("accelerator", [CpuAccelerator(), MusaAccelerator()], ids=lambda a: a.name)
def test_an_accelerator_without_one_says_so(accelerator):
    with pytest.raises(AcceleratorError, match=f"{accelerator.name} has none"):
        memory_saver_env(accelerator, {})


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_reason(install, variable):
    """torch_memory_saver 24."""
    install("0.0.9")
    with pytest.raises(AcceleratorError, match=f"{variable}=.*pausing then frees nothing"):
        memory_saver_env(CUDA, {variable: "max_split_size_mb:64,expandable_segments: True"})
    assert memory_saver_problem(CUDA, {variable: "expandable_segments:False"}) is None


def test_an_old_or_missing_package_is_named(install):
    assert "not installed" in memory_saver_problem(CUDA, {})
    install("0.0.8")
    assert "0.0.8 is too old" in memory_saver_problem(CUDA, {})


def test_a_package_without_its_library_is_named(install):
    install("0.0.9", library=False)
    assert "no torch_memory_saver_hook_mode_preload library" in memory_saver_problem(CUDA, {})


def test_a_process_that_started_without_the_preload_is_told(install):
    """slime 1936."""
    path = install("0.0.9")
    with pytest.raises(AcceleratorError, match="started without it"):
        active_memory_saver({})
    assert active_memory_saver({"LD_PRELOAD": f"{path}/torch_memory_saver_hook_mode_preload.abi3.so"}) == "the saver"
