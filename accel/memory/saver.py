"""torch_memory_saver, where an accelerator has it: checked with its environment before any worker starts."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError

PACKAGE = "torch_memory_saver"
SHARES_PRELOAD = (0, 0, 10)  # before it, the package takes the whole of LD_PRELOAD for its own path
MINIMUM = (0, 0, 9)  # the first with a getter of the region flag, which the DeepEP guard reads
COMMON_ALLOCATOR_ENV = "PYTORCH_ALLOC_CONF"
PRELOAD_STEM = "torch_memory_saver_hook_mode_preload"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def memory_saver_env(accelerator: Accelerator, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment that a worker needs to pause and resume device memory: the library preloaded before others.

    AcceleratorError when this accelerator, installation or environment cannot do it.
    """
    problem = memory_saver_problem(accelerator, environ)
    if problem is not None:
        raise AcceleratorError(f"the memory saver cannot be used: {problem}")
    library = str(_preload_library())
    return {"LD_PRELOAD": ":".join([library, *_other_preloads(environ)])}


def memory_saver_problem(accelerator: Accelerator, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why workers of this accelerator could not use torch_memory_saver, and what to do; None when they can."""
    if not accelerator.capabilities.memory_saver:
        return f"{accelerator.name} has none; leave the option out, and memory is moved to the host instead"
    if importlib.util.find_spec(PACKAGE) is None:
        return "torch_memory_saver is not installed: pip install 'torch-memory-saver>=0.0.9'"
    version = metadata.version(PACKAGE)
    if _numbers(version) < MINIMUM:
        return f"torch_memory_saver {version} is too old: 0.0.9 or newer is needed"
    for variable in filter(None, (COMMON_ALLOCATOR_ENV, accelerator.allocator_env)):
        if _EXPANDABLE.search(environ.get(variable, "")):
            return (
                f"{variable}={environ[variable]} turns expandable segments on, and pausing then frees nothing: remove "
                "expandable_segments:True"
            )
    others = _other_preloads(environ)
    if others and _numbers(version) < SHARES_PRELOAD:
        return (
            f"torch_memory_saver {version} cannot share LD_PRELOAD with {':'.join(others)}: upgrade it to 0.0.10, or "
            "unset LD_PRELOAD"
        )
    if _preload_library() is None:
        return f"torch_memory_saver {version} has no {PRELOAD_STEM} library for this platform: reinstall it"
    return None


def active_memory_saver(environ: Mapping[str, str] = os.environ) -> Any:
    """The saver of this process, for ``region``, ``pause`` and ``resume``; AcceleratorError if it was not preloaded."""
    preload = environ.get("LD_PRELOAD", "")
    if PACKAGE not in preload:
        raise AcceleratorError(
            f"the memory saver was asked for, but this process started without it (LD_PRELOAD={preload!r}): start "
            "workers "
            "with memory_saver_env()"
        )
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


def _other_preloads(environ: Mapping[str, str]) -> list[str]:
    return [path for path in environ.get("LD_PRELOAD", "").split(":") if path and PACKAGE not in path]


def _preload_library() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    found = [path for folder in (package, package.parent) for path in folder.glob(f"{PRELOAD_STEM}*.so")]
    return found[0] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
