"""Compiling the emulated device: once, also when several processes begin together, and with a word about what lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.emulation import build
from accel.errors import AcceleratorError

ROOT = Path(__file__).parents[2]
BUILD = "from accel.emulation.build import build; print(build())"

# Stands for g++: counts its calls, takes its time, and writes what was compiled before.
COMPILER = """#!{python}
import shutil, sys, time
open({calls!r}, "a").write("compiled\\n")
time.sleep(1)
shutil.copy({built!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.mark.emulated
def test_of_two_processes_on_a_cold_cache_one_compiles_and_both_get_it(tmp_path):
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, calls=str(calls), built=str(build.build())))
    compiler.chmod(0o755)
    code = f"{BUILD}; from accel import select_accelerator; import torch; select_accelerator('musa', emulate=True); "
    code += "print(torch.ones(2, device='musa').sum().item())"
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "a cache"),
        "CXX": str(compiler),
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == "2.0"
    assert Path(outputs[0][0]).is_relative_to(tmp_path / "a cache" / "accelrl" / "emulation")
    assert calls.read_text() == "compiled\n"


def test_without_a_compiler_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(AcceleratorError, match="no C\\+\\+ compiler is found: install g\\+\\+"):
        build.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AcceleratorError, match="CXX='no-such-compiler' is not found"):
        build.build()


def test_a_failed_compilation_shows_the_compilers_errors(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'extension.cpp:1: error: something is missing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(AcceleratorError, match=r"status 1:\nextension\.cpp:1: error: something is missing"):
        build.build()
    assert not build.built_file().exists()


def test_a_directory_that_others_can_write_to_is_not_loaded_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.built_file().parent.mkdir(parents=True)
    build.built_file().parent.chmod(0o777)
    with pytest.raises(AcceleratorError, match="can be written by others"):
        build.build()


def test_a_file_that_others_can_write_to_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.built_file().parent.mkdir(parents=True, mode=0o700)
    build.built_file().touch()
    build.built_file().chmod(0o666)
    with pytest.raises(AcceleratorError, match=r"_accelrl_musa\.so can be written by others"):
        build.build()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build.built_file()
    built.parent.mkdir(parents=True, mode=0o700)
    built.with_suffix(".lock").mkdir()  # stands for a file system that is read-only, which stops no superuser
    with pytest.raises(AcceleratorError, match=r"cannot be written .*: set XDG_CACHE_HOME"):
        build.build()


def test_without_a_home_the_message_says_what_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", nobody)
    with pytest.raises(AcceleratorError, match="set XDG_CACHE_HOME"):
        build.build()


def test_a_compiler_may_be_named_with_arguments(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -m wrapper")
    assert build.compiler() == [sys.executable, "-m", "wrapper"]


def test_another_torch_or_source_is_another_file(tmp_path, monkeypatch):
    before = build.built_file()
    monkeypatch.setattr(build.torch.version, "git_version", "another")
    assert build.built_file() != before
    monkeypatch.undo()
    (tmp_path / "devices.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.built_file() != before


def test_every_source_is_compiled():
    assert {path.name for path in build.SOURCES.glob("*.cpp")} == set(build.UNITS)
