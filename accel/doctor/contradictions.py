"""Settings that cannot both be meant, each with its fix."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from accel.backends.cpu import devices_asked, usable_cores
from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.handoff import AcceleratorSpec
from accel.masks import VisibleDevices, mask_problems
from accel.memory.saver import COMMON_ALLOCATOR_ENV
from accel.probing import Probe
from accel.registry import ACCELERATOR_ENV, SPEC_ENV

AUTOLOAD_ENV = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class Contradiction:
    """What is wrong, and what to do about it."""

    problem: str
    fix: str


def find_contradictions(
    probes: list[Probe],
    chosen: str | None,
    loaded: Collection[str],
    environ: Mapping[str, str] = os.environ,
) -> list[Contradiction]:
    """What contradicts itself for the accelerator ``chosen`` for the run (None: not known).

    ``loaded``: the modules imported before any backend was probed.
    """
    accelerators = [probe.accelerator for probe in probes if probe.accelerator is not None]
    in_question = [accelerator for accelerator in accelerators if chosen in (None, accelerator.name)]
    found = [
        *_masks(in_question, environ),  # masks of vendors that the run is not on are none of its business
        *_unreadable_lists(in_question, environ),
        *_autoloaded(accelerators, chosen, loaded, environ),
        *_allocators(accelerators, environ),
        *_handed_over(environ),
        *_threads(environ),
    ]
    return list(dict.fromkeys(found))


def _masks(accelerators: list[Accelerator], environ: Mapping[str, str]) -> list[Contradiction]:
    found = []
    for accelerator in accelerators:
        for text in _readable(lambda a=accelerator: mask_problems(a, environ)):  # type: ignore[misc]
            problem, _, fix = text.rpartition(": ")
            found.append(Contradiction(problem, fix))
    return found


def _unreadable_lists(accelerators: list[Accelerator], environ: Mapping[str, str]) -> list[Contradiction]:
    found = []
    for accelerator in accelerators:
        variable = accelerator.mask_variable(environ)
        if variable is None:
            continue
        try:
            VisibleDevices.parse(variable, environ.get(variable))
        except AcceleratorError as error:
            found.append(Contradiction(str(error), f"correct or unset {variable}"))
    return found


def _autoloaded(
    accelerators: list[Accelerator], chosen: str | None, loaded: Collection[str], environ: Mapping[str, str]
) -> list[Contradiction]:
    """torch imports every installed vendor plugin at its own import, wanted or not."""
    return [
        Contradiction(
            f"torch loaded {accelerator.torch_plugin} although the run is on {chosen} "
            f"({AUTOLOAD_ENV}={environ.get(AUTOLOAD_ENV, '1')})",
            f"set {AUTOLOAD_ENV}=0 where the driver starts (workers get it by themselves)",
        )
        for accelerator in accelerators
        if accelerator.torch_plugin in loaded and chosen not in (None, accelerator.name)
    ]


def _allocators(accelerators: list[Accelerator], environ: Mapping[str, str]) -> list[Contradiction]:
    common = environ.get(COMMON_ALLOCATOR_ENV, "").strip()
    found = []
    for variable in sorted({a.allocator_env for a in accelerators if a.allocator_env}):
        own = environ.get(variable, "").strip()
        if common and own and common != own:
            problem = (
                f"{COMMON_ALLOCATOR_ENV}={common} and {variable}={own} differ, and which one counts depends on torch"
            )
            found.append(Contradiction(problem, f"unset {variable}"))
    return found


def _handed_over(environ: Mapping[str, str]) -> list[Contradiction]:
    spec, variable = environ.get(SPEC_ENV, "").strip(), environ.get(ACCELERATOR_ENV, "").strip().lower()
    if not spec:
        return []
    try:
        name = AcceleratorSpec.parse(spec).name
    except AcceleratorError as error:
        return [Contradiction(f"{SPEC_ENV}: {error}", f"unset {SPEC_ENV}: a driver sets it for its own workers")]
    if variable not in ("", "auto", name):
        problem = f"{SPEC_ENV}={spec} and {ACCELERATOR_ENV}={variable} disagree"
        return [Contradiction(problem, f"unset {ACCELERATOR_ENV}")]
    return []


def _threads(environ: Mapping[str, str]) -> list[Contradiction]:
    threads = environ.get("OMP_NUM_THREADS", "").strip()
    found = []
    try:
        devices_asked(environ)
    except AcceleratorError as error:
        problem, _, fix = str(error).rpartition(": ")
        found.append(Contradiction(f"{problem} is no number of devices", f"{fix}, or unset it"))
    if threads.isdecimal() and int(threads) > usable_cores():
        problem = (
            f"OMP_NUM_THREADS={threads} with {usable_cores()} usable cores (torch: {torch.get_num_threads()} threads)"
        )
        found.append(Contradiction(problem, f"set OMP_NUM_THREADS to {usable_cores()} or less, or unset it"))
    return found


def _readable(check: Callable[[], list[str]]) -> list[str]:
    """What a check found; a list that cannot be read is reported by ``_unreadable_lists``."""
    try:
        return check()
    except AcceleratorError:
        return []
