"""A compiled stand-in for torch_memory_saver's shared library, with its real signatures, and what loads it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

# The flag is each thread's own, as in the real library; the log is the process's.
SOURCE = """
#include <stdbool.h>
#include <string.h>
static _Thread_local bool interesting;
static char events[1024];
static void note(const char* event) {
    if (events[0]) strcat(events, " ");
    strcat(events, event);
}
void stand_in_note(const char* event) { note(event); }
const char* stand_in_events(void) { return events; }
void stand_in_forget(void) { events[0] = 0; }
#ifdef VERSION_0_0_8
void tms_region_enter(void) { interesting = true; }
void tms_region_leave(void) { interesting = false; }
#else
void tms_set_interesting_region(bool value) { note(value ? "set-True" : "set-False"); interesting = value; }
bool tms_get_interesting_region(void) { note("get"); return interesting; }
#endif
"""


def compile_library(folder: Path, source: str, name: str, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to make the stand-in for torch_memory_saver's library with")
    code, library = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(source)
    subprocess.run([compiler, "-std=c11", "-shared", "-fPIC", *flags, "-o", library, code], check=True, timeout=60)
    return library


def load_stand_in(path: Path) -> ctypes.CDLL:
    """With the signatures that torch_memory_saver's BinaryWrapper sets up."""
    library = ctypes.CDLL(str(path))
    library.stand_in_note.argtypes = [ctypes.c_char_p]
    library.stand_in_events.restype = ctypes.c_char_p
    try:
        library.tms_set_interesting_region.argtypes = [ctypes.c_bool]
        library.tms_get_interesting_region.restype = ctypes.c_bool
    except AttributeError:
        library.tms_region_enter.argtypes = []
    library.stand_in_forget()
    return library


def events_of(library: ctypes.CDLL) -> list[str]:
    return library.stand_in_events().decode().split()


def saver_package(library: ctypes.CDLL | None) -> ModuleType:
    """The package as it is once imported: in use with this library, or not used yet."""
    package = ModuleType("torch_memory_saver")
    wrapper = None if library is None else SimpleNamespace(_binary_wrapper=SimpleNamespace(cdll=library))
    package.torch_memory_saver = SimpleNamespace(_impl=wrapper)
    return package


def deep_ep_package(initialise, **more) -> ModuleType:
    """A module with the buffer class that DeepEP has; ``initialise(self, *args)`` is its ``__init__``."""
    package = ModuleType("deep_ep")
    package.Buffer = type("Buffer", (), {"__init__": initialise})
    for name, value in more.items():
        setattr(package, name, value)
    return package


def put(monkeypatch, **packages) -> None:
    for name, package in packages.items():
        if package is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, package)
