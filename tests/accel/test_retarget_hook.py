"""The import hook belongs to a process, so each test runs a script of checks in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import sys
from types import ModuleType, SimpleNamespace
from accel.backends.cpu import CpuAccelerator
from accel.errors import AcceleratorError
from accel.retarget import install

def refused(call, *named):
    try:
        call()
    except AcceleratorError as error:
        for name in named:
            assert name in str(error), (name, str(error))
        return error
    raise AssertionError(f"not refused: {named}")

class OtherAccelerator(CpuAccelerator):
    name = "other"

class OnCuda(CpuAccelerator):
    name = "cuda"
    device_type = "cuda"
"""

DEVICE_CODE = '"""Moves to cuda."""\nimport torch\nWHERE = "cuda"\n\ndef stream():\n    return torch.cuda.Stream()\n'


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def run_script(tmp_path: Path, script: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        env=os.environ
        | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
        | env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small package that stands in front of the installed Megatron-Core under its name."""
    write_tree(
        tmp_path,
        {
            "megatron/core/__init__.py": "",
            "megatron/core/package_info.py": "__version__ = '0.16.1'\n",
            "megatron/core/model.py": DEVICE_CODE,
            "megatron/core/unknown.py": "X = 'cuda:%d'\n",
            "megatron/core/missing.py": "import torch\n\ndef pool():\n    return torch.cuda.MemPool()\n",
            "megatron/core/fuser.py": "fuse = 'compiled'\n",
            "megatron/core/fused.py": "from megatron.core.fuser import fuse\n",
            "megatron/corelike.py": DEVICE_CODE,
            "user_models/__init__.py": "",
            "user_models/own.py": DEVICE_CODE,
            "user_late.py": DEVICE_CODE,
            "untouched.py": DEVICE_CODE,
        },
    )
    return tmp_path


def test_installing_is_checked(library: Path) -> None:
    run_script(
        library,
        """
        from pathlib import Path
        before = list(sys.meta_path)
        install(OnCuda(), extra_modules=["json"])
        assert sys.meta_path == before

        cpu = CpuAccelerator()
        refused(lambda: install(cpu, extra_modules=["torch.nn"]), "torch.nn", "never rewritten")
        refused(lambda: install(cpu, extra_modules=["models/own.py"]), "models/own.py", "dotted name")
        refused(lambda: install(cpu, extra_modules=["json"]), "json", "already imported")
        sys.modules["megatron.core.model"] = ModuleType("megatron.core.model")
        refused(lambda: install(cpu), "megatron.core.model", "already imported", "before the first import")
        del sys.modules["megatron.core.model"]

        info = Path("megatron/core/package_info.py")
        info.write_text("__version__ = '0.18.3'")
        refused(lambda: install(cpu), "0.18.3", ">=0.16.1,<0.17.0")
        info.unlink()
        refused(lambda: install(cpu), "package_info.py is missing")
        sys.modules["megatron"].__path__, found = [], sys.modules["megatron"].__path__
        refused(lambda: install(cpu), "megatron-core is not installed", "pip install")
        sys.modules["megatron"].__path__ = found
        info.write_text("__version__ = '0.16.1'")
        assert sys.meta_path == before

        install(cpu, extra_modules="user_models")
        install(cpu)
        install(CpuAccelerator(), extra_modules=["user_models"])
        assert len(sys.meta_path) == len(before) + 1
        refused(lambda: install(OtherAccelerator()), "accelerator 'cpu'", "new process for 'other'")

        import user_models.own
        install(cpu, extra_modules=["user_models.own"])  # covered already
        import untouched
        refused(lambda: install(cpu, extra_modules=["untouched"]), "untouched is already imported")
        install(cpu, extra_modules=["user_late"])
        import user_late
        assert user_models.own.WHERE == user_late.WHERE == "cpu"
        """,
    )


def test_only_the_named_modules_are_rewritten(library: Path) -> None:
    run_script(
        library,
        """
        import os, py_compile, torch
        py_compile.compile("untouched.py", cfile="megatron/core/compiled.pyc", doraise=True)
        stream_type, attributes = torch.cuda.Stream, set(vars(torch.cuda))
        patched = []
        def disable(fuser):
            patched.append(fuser.__name__)
            fuser.fuse = "plain"
        install(CpuAccelerator(), after_import={"megatron.core.fuser": disable})

        import megatron.core.model, megatron.corelike, untouched, inspect
        from accel.backends import cpu_namespace
        assert megatron.core.model.WHERE == "cpu"
        assert isinstance(megatron.core.model.stream(), cpu_namespace.Stream)
        assert megatron.core.model.__doc__ == "Moves to cuda."
        assert 'WHERE = "cuda"' in inspect.getsource(megatron.core.model)
        assert untouched.WHERE == megatron.corelike.WHERE == "cuda"
        assert torch.cuda.Stream is stream_type and set(vars(torch.cuda)) == attributes
        assert not torch.cuda.is_initialized()

        from megatron.core.fused import fuse
        assert (fuse, patched) == ("plain", ["megatron.core.fuser"])

        error = refused(lambda: __import__("megatron.core.unknown"), "unknown.py, line 1", "'cuda:%d'")
        assert "megatron.core.unknown" not in sys.modules
        refused(lambda: __import__("megatron.core.compiled"), "megatron.core.compiled", "compiled.pyc", "plain .py")
        import megatron.core.missing
        error = refused(megatron.core.missing.pool, "megatron.core.missing line 4", "torch.cuda.MemPool", "'cpu'")
        assert isinstance(error, AttributeError)
        """,
    )


COUNT_REWRITES = """
import json
from accel.retarget import hook
rewritten = []
original = hook.RetargetLoader.source_to_code
def counting(self, data, path):
    rewritten.append(self.name)
    return original(self, data, path)
hook.RetargetLoader.source_to_code = counting
install(CpuAccelerator())
import megatron.core.model
assert megatron.core.model.stream.__code__.co_filename.endswith("model.py")
print(json.dumps([megatron.core.model.WHERE, len(rewritten)]))
"""


def test_second_process_rewrites_only_what_changed(library: Path) -> None:
    assert run_script(library, COUNT_REWRITES) == '["cpu", 2]\n'
    (library / "megatron/core/model.py").write_text(DEVICE_CODE + 'WHERE += " then"\n')
    assert run_script(library, COUNT_REWRITES) == '["cpu then", 1]\n'
    assert not list(library.rglob("megatron/**/*.pyc"))


@pytest.mark.slow
def test_processes_that_start_at_once_share_the_cache(library: Path) -> None:
    script = PRELUDE + COUNT_REWRITES
    env = os.environ | {"PYTHONPATH": str(library), "XDG_CACHE_HOME": str(library / "cache")}
    env["PYTHONDONTWRITEBYTECODE"] = ""
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=env, cwd=library, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0
        assert output.startswith('["cpu", ')
    (directory,) = (library / "cache" / "accelrl" / "retarget").iterdir()
    assert sorted(path.suffix for path in directory.iterdir()) == [".code", ".code"]
    assert run_script(library, COUNT_REWRITES) == '["cpu", 0]\n'
