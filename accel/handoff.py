"""From driver to worker: which backend, in words that a worker can import and check.

A specification is ``name=module:attribute@version``. A worker imports exactly that and fails when its copy is another
version, so that all processes of a job agree. It also carries backends registered in code or shipped with the job.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.masks import mask_problems
from accel.registration import Registration, load_attribute
from accel.registry import SPEC_ENV, Registry, Selection, process_registry

_SPEC = re.compile(r"(?P<name>[^=@:\s]+)=(?P<module>[\w.]+):(?P<attribute>[\w.]+)@(?P<version>[^\s+]\S*)")


@dataclass(frozen=True)
class AcceleratorSpec:
    """A backend by name, by what makes it, and by version."""

    name: str
    target: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}={self.target}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> AcceleratorSpec:
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise AcceleratorError(f"{text!r} is no accelerator specification: expected name=module:attribute@version")
        return cls(match["name"], f"{match['module']}:{match['attribute']}", match["version"])


def accelerator_spec(accelerator: Accelerator, registry: Registry | None = None) -> str:
    """The specification of this process's backend; AcceleratorError when no other process could import its factory."""
    registry = registry or process_registry()
    selection = registry.selected()
    if selection is not None and selection.accelerator is accelerator:
        target: object = selection.registration.target
    else:
        registration = registry.registrations().get(accelerator.name)
        target = registration.target if registration is not None else type(accelerator)
    text = target if isinstance(target, str) else importable_name(target)
    load_attribute(text)
    return str(AcceleratorSpec(accelerator.name, text, code_version(text.partition(":")[0])))


def importable_name(factory: object) -> str:
    """The "module:attribute" of a factory, checked: a lambda or a function of a script cannot be handed over."""
    module = getattr(factory, "__module__", None)
    attribute = getattr(factory, "__qualname__", None)
    name = f"{module}:{attribute}"
    if module in (None, "__main__") or attribute is None or "<" in attribute:
        raise AcceleratorError(
            f"workers cannot import the accelerator factory {name}: put it at the top level of an importable module"
        )
    if load_attribute(name) is not factory:
        raise AcceleratorError(f"{name} is not the registered factory but something else of that name: rename one")
    return name


def load_accelerator_spec(spec: str, registry: Registry | None = None, *, needs_device: bool = True) -> Accelerator:
    """Import, check and select what the driver handed over; AcceleratorError on another version, name or no device."""
    wanted = AcceleratorSpec.parse(spec)
    load_attribute(wanted.target)
    version = code_version(wanted.target.partition(":")[0])
    if version != wanted.version:
        raise AcceleratorError(
            f"the driver runs {wanted.target} at {wanted.version}, this worker has {version}: install one on every node"
        )
    registration = Registration(wanted.name, wanted.target, f"the driver ({wanted.target})")
    accelerator = registration.make()
    problems = mask_problems(accelerator)
    if problems:
        raise AcceleratorError(f"in this worker: {'; '.join(problems)}")
    if needs_device:
        accelerator.prepare()
        reason = accelerator.unavailable_reason()
        if reason is not None:
            raise AcceleratorError(f"the driver runs on {wanted.name!r}, which is not usable in this worker: {reason}")
    registry = registry or process_registry()
    why = f"handed over by the driver ({spec})"
    return registry.adopt(registration, accelerator, why, accelerator.emulated).accelerator


def adopt_from_environment(registry: Registry) -> Selection | None:
    """The selection named in ``ACCELRL_ACCELERATOR_SPEC``, or None when the variable is not set."""
    spec = os.environ.get(SPEC_ENV, "").strip()
    if not spec:
        return None
    load_accelerator_spec(spec, registry)
    return registry.selected()


def code_version(module: str) -> str:
    """What differs between two nodes whose copies of a module differ: its package's version, and a digest of its code.

    The digest is of every ``.py`` file of the outermost package that the module is in, or of the module's own file. The
    version alone would not do: a checkout and a folder that is shipped with the job have one that stays the same.
    """
    distributions = metadata.packages_distributions().get(module.partition(".")[0])
    source = _source(module)
    if source is None and not distributions:
        raise AcceleratorError(f"cannot tell the version of the module {module!r}: it has no source file")
    digest = "" if source is None else f"src-{_digest(source)}"
    return "+".join(filter(None, (metadata.version(distributions[0]) if distributions else "", digest)))


def _source(module: str) -> Path | None:
    """The folder of the outermost package that a module is in, or its own file; None where it has no file."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):  # a namespace package has no file, and is shared by strangers
        found = importlib.util.find_spec(".".join(parts[:end]))
        origin = Path(found.origin) if found is not None and found.origin is not None else None
        if origin is not None and origin.is_file():
            return origin.parent if found is not None and found.submodule_search_locations is not None else origin
    return None


def _digest(source: Path) -> str:
    """The same wherever the package lies: relative names and contents alone count."""
    folder, files = (source, sorted(source.rglob("*.py"))) if source.is_dir() else (source.parent, [source])
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
