"""Compiles the extension, once for each source and torch, into the user's cache. Safe when several processes begin."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from accel.errors import AcceleratorError

MODULE = "_accelrl_musa"
SOURCES = Path(__file__).parent / "csrc"
# In one translation unit: most of the time goes into torch's headers, which each further unit would read again.
UNITS = (
    "devices.cpp",
    "memory.cpp",
    "generator.cpp",
    "streams.cpp",
    "aliases.cpp",
    "hooks.cpp",
    "kernels.cpp",
    "attention.cpp",
    "autocast.cpp",
    "collectives.cpp",
    "bindings.cpp",
)
FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-Wno-interference-size", f"-DTORCH_EXTENSION_NAME={MODULE}")
DEFINES = ("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")


def build() -> Path:
    """The extension's file, compiled first unless it is there. Of several processes one compiles, the others wait."""
    built = built_file()
    _make_private(built.parent)
    if not built.is_file():
        try:
            with _locked(built.with_suffix(".lock")):
                if not built.is_file():
                    _compile(built)
        except OSError as error:
            raise AcceleratorError(
                f"the emulated MUSA device is compiled into {built.parent}, which cannot be written "
                f"({error.strerror}): set XDG_CACHE_HOME to a directory that you can write to"
            ) from error
    _check_private(built)
    return built


def built_file() -> Path:
    """Where the extension of these sources for this torch and Python is kept."""
    key = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    key.update(repr((UNITS, FLAGS, DEFINES, LIBRARIES, torch.version.git_version)).encode())
    name = f"{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}-{key.hexdigest()[:16]}"
    return cache_directory() / name / f"{MODULE}.so"


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    except RuntimeError as error:  # neither HOME nor an entry for this user
        raise AcceleratorError(
            "the emulated MUSA device is compiled into a cache in the home directory, and this user has none: set "
            "XDG_CACHE_HOME to a directory that you can write to"
        ) from error
    return base / "accelrl" / "emulation"


def compiler() -> list[str]:
    """``CXX`` (which may bring arguments), else g++, c++ or clang++; AcceleratorError says what to install."""
    asked = os.environ.get("CXX", "").strip()
    commands = [shlex.split(asked)] if asked else [["g++"], ["c++"], ["clang++"]]
    found = next(([path, *rest] for name, *rest in commands if (path := shutil.which(name))), None)
    if found is None:
        what = f"CXX={asked!r} is not found" if asked else "no C++ compiler is found"
        raise AcceleratorError(
            f"the emulated MUSA device is compiled on its first use, and {what}: install g++ 11 or newer "
            "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name a compiler in CXX"
        )
    return found


def compile_command(source: Path, target: Path) -> list[str]:
    torch_home = Path(torch.__file__).parent
    includes = [SOURCES, torch_home / "include", torch_home / "include/torch/csrc/api/include"]
    python_headers = Path(sysconfig.get_path("include"))
    if not (python_headers / "Python.h").is_file():
        raise AcceleratorError(
            f"compiling the emulated MUSA device needs Python's headers, and {python_headers} has no Python.h: "
            "install them (Debian, Ubuntu: apt install python3-dev)"
        )
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        *compiler(),
        *FLAGS,
        *DEFINES,
        abi,
        *(f"-I{path}" for path in includes),
        f"-isystem{python_headers}",
        str(source),
        "-o",
        str(target),
        f"-L{torch_home / 'lib'}",
        *LIBRARIES,
    ]


def _compile(built: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=built.parent) as folder:
        source, target = Path(folder, "extension.cpp"), Path(folder, built.name)
        source.write_text("".join(f'#include "{unit}"\n' for unit in UNITS))
        command = compile_command(source, target)
        print("accelrl: compiling the emulated MUSA device (about a minute, once)", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise AcceleratorError(
                f"compiling the emulated MUSA device failed with status {done.returncode}:\n"
                + "\n".join(errors[:10] or done.stderr.splitlines()[-10:])
                + f"\nThe command was: {shlex.join(command)}"
            )
        os.replace(target, built)  # at once: a process that looks sees all of it or nothing


def _make_private(directory: Path) -> None:
    """What is in there gets loaded into processes, so nobody else may write to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise AcceleratorError(
            f"the emulated MUSA device is compiled into {directory}, which cannot be made ({error.strerror}): "
            "set XDG_CACHE_HOME to a directory that you can write to"
        ) from error
    _check_private(directory)


def _check_private(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise AcceleratorError(
            f"{path} can be written by others, so its compiled code is not loaded: remove it, or set XDG_CACHE_HOME to "
            "a directory of your own"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock that a process that dies gives up."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
