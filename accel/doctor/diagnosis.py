"""Collects the facts that ``python -m accel doctor`` shows: backends, devices, versions, settings, contradictions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any

import torch

from accel.comm import process_group_backend, weight_update_backend
from accel.contract import Accelerator
from accel.doctor.contradictions import Contradiction, find_contradictions
from accel.errors import AcceleratorError
from accel.masks import VisibleDevices
from accel.memory.saver import memory_saver_problem
from accel.probing import Probe
from accel.registration import AUTO
from accel.registry import ACCELERATOR_ENV, Registry, process_registry

PACKAGES = {
    "accelrl": ("accelrl",),
    "megatron-core": ("megatron-core",),
    "ray": ("ray",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "memory saver": ("torch-memory-saver",),
    "DeepEP": ("deep-ep", "sgl-deep-ep"),
    "torch_musa": ("torch-musa",),
    "torchada": ("torchada",),
}
ENV_PREFIXES = (
    "ACCELRL_",
    "RAY_EXPERIMENTAL_NOSET_",
    "PYTORCH_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "LD_PRELOAD",
)
ENV_SUFFIX = "VISIBLE_DEVICES"
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class DeviceFacts:
    """One device. Memory in bytes; ``physical`` is its id in the visible-devices list."""

    index: int
    physical: str
    name: str
    uuid: str | None
    free: int | None
    total: int | None


@dataclass(frozen=True)
class BackendFacts:
    """One registered backend, usable or not."""

    name: str
    usable: bool
    reason: str | None
    origin: str
    priority: int | None = None
    emulated: bool = False
    runtime: str | None = None
    devices: list[DeviceFacts] = field(default_factory=list)
    process_group_backend: str | None = None
    weight_update_backend: str | None = None
    memory_saver: str | None = None  # None: usable; else why not
    capabilities: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that doctor found. ``selected`` is None when what was asked for is not usable, and ``why`` says so."""

    selected: str | None
    why: str
    backends: list[BackendFacts]
    versions: dict[str, str | None]
    environment: dict[str, str]
    contradictions: list[Contradiction]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    name: str | None = None,
    *,
    emulate: bool = False,
    registry: Registry | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Diagnosis:
    """Select as a run would, then probe every backend. Never raises for an unusable one."""
    registry = registry or process_registry()
    loaded = frozenset(sys.modules)  # before anything of a vendor's is imported by us
    selected: str | None
    asked = (name or environ.get(ACCELERATOR_ENV, "")).strip().lower()
    chosen = None if asked in ("", AUTO) else asked
    try:
        selection = registry.select(name, emulate=emulate)
        selected, why = selection.registration.name, selection.why
        chosen = selected
        facts = _backend_facts(Probe(selection.registration, selection.accelerator, None), environ)
        if not facts.usable:
            selected, why = None, f"{chosen} was chosen ({why}), but {facts.reason}"
    except AcceleratorError as error:
        selected, why = None, str(error)
    probes = registry.probes()
    return Diagnosis(
        selected=selected,
        why=why,
        backends=[_backend_facts(probe, environ) for probe in probes],
        versions=installed_versions([p.accelerator for p in probes if p.accelerator]),
        environment=_environment([p.accelerator for p in probes if p.accelerator], environ),
        contradictions=find_contradictions(probes, chosen, loaded, environ),
    )


def installed_versions(accelerators: list[Accelerator]) -> dict[str, str | None]:
    """Versions by name; None where a package is not installed. Nothing is imported for it."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch CUDA build": torch.version.cuda,
        "torch ROCm build": torch.version.hip,
    }
    for label, distributions in PACKAGES.items():
        versions[label] = next(filter(None, map(_version, distributions)), None)
    return versions | {a.monitor_package: _version(a.monitor_package) for a in accelerators if a.monitor_package}


def _backend_facts(probe: Probe, environ: Mapping[str, str]) -> BackendFacts:
    accelerator = probe.accelerator
    name, origin = probe.registration.name, probe.registration.origin
    if accelerator is None:
        return BackendFacts(name, False, probe.reason, origin)
    facts = BackendFacts(
        name, probe.usable, probe.reason, origin, priority=accelerator.priority, emulated=accelerator.emulated
    )
    if not probe.usable:
        return facts
    try:
        return replace(
            facts,
            runtime=accelerator.runtime_version(),
            devices=_devices(accelerator),
            process_group_backend=process_group_backend(accelerator),
            weight_update_backend=weight_update_backend(accelerator),
            memory_saver=memory_saver_problem(accelerator, environ),
            capabilities=asdict(accelerator.capabilities),
        )
    except Exception as error:  # noqa: BLE001 - a vendor's call may raise anything; doctor shows it as the reason
        return replace(facts, usable=False, reason=f"asking its devices raised {type(error).__name__}: {error}")


def _devices(accelerator: Accelerator) -> list[DeviceFacts]:
    listed = VisibleDevices.parse(accelerator.mask_variable(), accelerator.visible_devices())
    devices = []
    for index in range(accelerator.device_count()):
        memory = accelerator.memory_info(index)
        physical, uuid = listed.physical_id(index), accelerator.device_uuid(index)
        devices.append(DeviceFacts(index, physical, accelerator.device_name(index), uuid, memory.free, memory.total))
    return devices


def _environment(accelerators: list[Accelerator], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that bear on accelerators; the values of anything that looks secret stay hidden."""
    prefixes = (*ENV_PREFIXES, *(prefix for accelerator in accelerators for prefix in accelerator.env_prefixes))
    shown = sorted(name for name in environ if name.startswith(prefixes) or name.endswith(ENV_SUFFIX))
    return {name: "(hidden)" if any(word in name for word in SECRET_WORDS) else environ[name] for name in shown}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
