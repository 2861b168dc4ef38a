"""Which accelerators exist and which one this process uses: register, discover, probe, select."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata

from accel.backends.names import IN_TREE
from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.masks import mask_problems
from accel.probing import PROBE_TIMEOUT_ENV, Probe, probe, probe_timeout
from accel.registration import (
    AUTO,
    Factory,
    Registration,
    check_factory,
    described,
    is_target,
    load_attribute,
    make_accelerator,
    name_problem,
)

ENTRY_POINT_GROUP = "accelrl.accelerators"
ACCELERATOR_ENV = "ACCELRL_ACCELERATOR"
SPEC_ENV = "ACCELRL_ACCELERATOR_SPEC"

logger = logging.getLogger("accel")


@dataclass(frozen=True)
class Selection:
    """The decision of this process, with its reason in words."""

    accelerator: Accelerator
    registration: Registration
    why: str
    emulate: bool = False
    passed_over: tuple[Probe, ...] = field(default=())


class Registry:
    """Backends by name and one selection. A process uses one; tests make their own. All methods are thread-safe."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, discover: Callable[[], list[Registration]] | None = None
    ):
        self._environ = environ
        self._discover = discover or _entry_points
        self.renew_locks()
        self._registered: dict[str, Registration] = {
            name: Registration(name, target, f"accelrl ({target})") for name, target in IN_TREE.items()
        }
        self._installed: dict[str, Registration] | None = None
        self._probes: dict[str, Probe] = {}
        self._selection: Selection | None = None

    def renew_locks(self) -> None:
        """New locks, for a forked child: a thread that held one of the old ones is not there to give it back."""
        self._lock = threading.RLock()  # the tables; held for moments, so that a probed module may register others
        self._deciding = threading.RLock()  # held while backends are probed and one is selected

    def register(self, name: str, factory: Factory | str, *, override: bool = False) -> None:
        """Add a backend; see ``register_accelerator``."""
        key = _normalized(name)
        problem = name_problem(key)
        if problem is not None:
            raise AcceleratorError(problem)
        check_factory(key, factory)
        origin = described(factory)
        with self._lock:
            known = self._all().get(key)
            if known and not override:
                raise AcceleratorError(
                    f"the accelerator {key!r} is already registered by {known.origin}: choose another name, or replace "
                    f"it with register_accelerator({key!r}, …, override=True)"
                )
            if self._selection is not None and self._selection.registration.name == key:
                raise AcceleratorError(f"{key!r} is this process's accelerator already: register before it is selected")
            self._registered[key] = Registration(key, factory, origin)
            self._probes.pop(key, None)

    def registrations(self) -> dict[str, Registration]:
        """Every backend by name, none of them loaded."""
        with self._lock:
            return dict(sorted(self._all().items()))

    def platform(self, name: str) -> Accelerator:
        """The backend of that name, not probed: its facts, for a driver that has no such device."""
        return self._named(name).make()

    def probe(self, name: str) -> Probe:
        """Load and ask one backend, once per process. What it raises is kept in the answer, not thrown."""
        with self._deciding:
            registration = self._named(name)
            if registration.name not in self._probes:
                self._probes[registration.name] = self._ask(registration)
            return self._probes[registration.name]

    def probes(self) -> list[Probe]:
        """Every backend probed, by falling priority."""
        return sorted((self.probe(name) for name in self.registrations()), key=lambda p: -_priority(p))

    def selected(self) -> Selection | None:
        return self._selection

    def select(self, name: str | None = None, *, emulate: bool = False, needs_device: bool = True) -> Selection:
        """Decide, or confirm what is decided; see ``select_accelerator``."""
        with self._deciding:
            asked, source = self._asked(name)
            if self._selection is not None:
                _confirm(self._selection, asked, source, emulate)
                return self._selection
            if asked is None and emulate:
                raise AcceleratorError("--emulate needs the accelerator to emulate: name it with --accelerator")
            selection = self._auto() if asked is None else self._explicit(asked, source, emulate, needs_device)
            problems = mask_problems(selection.accelerator, self._environ)
            if problems:
                raise AcceleratorError("; ".join(problems))
            self._selection = selection
            logger.info("accelerator %s: %s", selection.accelerator.name, selection.why)
            return selection

    def adopt(self, registration: Registration, accelerator: Accelerator, why: str, emulate: bool) -> Selection:
        """Take the driver's choice in a worker: one that was decided differently before is an error."""
        with self._deciding:
            if self._selection is not None:
                _confirm(self._selection, registration.name, "the driver", emulate)
                return self._selection
            self._registered[registration.name] = registration
            self._selection = Selection(accelerator, registration, why, emulate)
            return self._selection

    def _asked(self, name: str | None) -> tuple[str | None, str]:
        """The explicit choice and who made it; (None, "") for auto."""
        flag = self._choice(name)
        variable = self._choice(self._environ.get(ACCELERATOR_ENV))
        if flag and variable and flag != variable:
            raise AcceleratorError(
                f"--accelerator {flag} and {ACCELERATOR_ENV}={variable} disagree: unset one, or name the same"
            )
        if flag:
            return flag, f"--accelerator {flag}"
        if variable:
            return variable, f"{ACCELERATOR_ENV}={variable}"
        return None, ""

    def _explicit(self, asked: str, source: str, emulate: bool, needs_device: bool) -> Selection:
        registration = self._named(asked)
        if emulate:
            emulated = registration.make().emulation()
            if emulated is None:
                raise AcceleratorError(
                    f"{source}: {asked!r} has no emulation; leave --emulate out or name one that has"
                )
            registration = Registration(asked, type(emulated), f"emulation of {asked}")
            asked_one = self._ask(registration)
            if asked_one.usable:
                self._probes[asked] = asked_one  # the name means the emulation from now on
        elif not needs_device:
            return Selection(registration.make(), registration, f"asked for by {source}; this process needs no device")
        else:
            asked_one = self.probe(asked)
        if asked_one.accelerator is None or not asked_one.usable:
            raise AcceleratorError(
                f"{source}: {asked!r} is not usable here: {asked_one.reason}. Nothing else is taken in its place; "
                f"`python -m accel doctor --accelerator {asked}` shows more"
            ) from asked_one.error
        is_emulated = asked_one.accelerator.emulated
        why = f"asked for by {source}" + (", emulated in host memory" if is_emulated else "")
        return Selection(asked_one.accelerator, registration, why, is_emulated)

    def _auto(self) -> Selection:
        """The usable backend with the highest priority; lower ones are not even probed once one is found."""
        passed_over: list[Probe] = []
        waiting = []
        for registration in self.registrations().values():
            try:
                waiting.append((registration.make().priority, registration.name))
            except Exception:  # noqa: BLE001 - kept as a probe result, shown by doctor and in the selection
                passed_over.append(self.probe(registration.name))
        for priority in sorted({p for p, _ in waiting}, reverse=True):
            tier = [self.probe(name) for p, name in waiting if p == priority]
            usable = [probe for probe in tier if probe.usable]
            passed_over += [probe for probe in tier if not probe.usable]
            if len(usable) > 1:
                names = ", ".join(probe.registration.name for probe in usable)
                raise AcceleratorError(
                    f"{names} are usable and of equal priority {priority}: name one with --accelerator"
                )
            if usable:
                return _auto_selection(usable[0], priority, passed_over)
        reasons = "; ".join(f"{probe.registration.name}: {probe.reason}" for probe in passed_over)
        raise AcceleratorError(f"no accelerator is usable here ({reasons})")

    def _choice(self, name: str | None) -> str | None:
        """An explicit choice as a registered name: "module:attribute" is registered under the name it declares."""
        if name is not None and is_target(name):
            return self._register_target(name.strip())
        normalized = _normalized(name or "")
        return None if normalized in ("", AUTO) else normalized

    def _register_target(self, target: str) -> str:
        name = make_accelerator(load_attribute(target), target).name
        known = self.registrations().get(name)
        if known is None or known.target != target:
            self.register(name, target)
        return name

    def _ask(self, registration: Registration) -> Probe:
        return probe(registration, probe_timeout(self._environ.get(PROBE_TIMEOUT_ENV)))

    def _named(self, name: str) -> Registration:
        registration = self._all().get(_normalized(name))
        if registration is None:
            known = ", ".join(sorted(self._all()))
            raise AcceleratorError(
                f"no accelerator is named {name!r}; known: {known}. Install the vendor's package (entry point group "
                f"{ENTRY_POINT_GROUP}) or call register_accelerator"
            )
        return registration

    def _all(self) -> dict[str, Registration]:
        with self._lock:
            if self._installed is None:
                self._installed = _merge_installed(self._discover(), self._registered)
            return self._installed | self._registered


def _priority(probe: Probe) -> int:
    return probe.accelerator.priority if probe.accelerator else -1


def _auto_selection(probe: Probe, priority: int, passed_over: list[Probe]) -> Selection:
    assert probe.accelerator is not None
    emulated = probe.accelerator.emulated
    why = f"usable{', emulated in host memory' if emulated else ''}, and the highest priority ({priority})"
    if passed_over:
        why += "; passed over " + "; ".join(f"{p.registration.name} ({p.reason})" for p in passed_over)
    return Selection(probe.accelerator, probe.registration, why, emulated, passed_over=tuple(passed_over))


def _confirm(selection: Selection, asked: str | None, source: str, emulate: bool) -> None:
    name = selection.registration.name
    if (asked is not None and asked != name) or (emulate and not selection.emulate):
        wanted = f"{asked or name}{' emulated' if emulate else ''}"
        raise AcceleratorError(
            f"this process runs on {name!r} ({selection.why}), and {source or 'a later call'} asks for {wanted}: "
            "select once, before anything calls get_accelerator()"
        )


def _normalized(name: str) -> str:
    return name.strip().lower()


def _entry_points() -> list[Registration]:
    """Backends of installed packages. Nothing of theirs is imported."""
    found = []
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"
        found.append(Registration(_normalized(point.name), point.value, f"{package} ({point.value})"))
    return [_checked(registration) for registration in found]


def _checked(registration: Registration) -> Registration:
    """The same, marked as unusable where a package's entry point cannot be meant: others go on, and doctor shows it."""
    problem = name_problem(registration.name)
    if problem is None and not (isinstance(registration.target, str) and is_target(registration.target)):
        problem = f"the value {registration.target!r} is not written as module:attribute"
    if problem is None:
        return registration
    return replace(registration, problem=f"the entry point of {registration.origin} is wrong: {problem}")


def _merge_installed(found: list[Registration], ours: Mapping[str, Registration]) -> dict[str, Registration]:
    """By name; a name that two packages claim, or that is ours, is kept as a clash and fails when it is asked for."""
    merged: dict[str, Registration] = {}
    for registration in found:
        name = registration.name
        if name in IN_TREE and name in ours:
            logger.warning(
                "%s claims our accelerator name %r and is ignored: rename its entry point", registration.origin, name
            )
        elif name in merged and merged[name].target != registration.target:
            merged[name] = Registration(name, merged[name].target, merged[name].origin, clash=registration.origin)
        else:
            merged[name] = registration
    return merged


_process = Registry()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=lambda: _process.renew_locks())


def process_registry() -> Registry:
    """The registry that this process's ``select_accelerator`` and ``get_accelerator`` use."""
    return _process


def register_accelerator(name: str, factory: Factory | str, *, override: bool = False) -> None:
    """Add a backend in code: a class or function without arguments, or its "module:attribute".

    Installed packages need no call: they declare an entry point in the group ``accelrl.accelerators``. A name that is
    taken is an AcceleratorError unless ``override``.
    """
    _process.register(name, factory, override=override)


def available_accelerators() -> dict[str, Probe]:
    """Every known backend by name, probed: usable, or why not."""
    return {probe.registration.name: probe for probe in _process.probes()}


def select_accelerator(name: str | None = None, *, emulate: bool = False, needs_device: bool = True) -> Accelerator:
    """Decide which accelerator this process uses, once; later calls confirm it or raise.

    ``name`` (the flag) or else ``ACCELRL_ACCELERATOR`` chooses explicitly: only that backend is loaded, and if it is
    not usable this is an AcceleratorError with the reason. "module:attribute" registers that backend and chooses it.
    With neither, or "auto", the usable backend of the highest priority is taken. ``needs_device=False`` is for a driver
    that only plans: an explicit choice is then not probed.
    """
    return _process.select(name, emulate=emulate, needs_device=needs_device).accelerator


def get_accelerator() -> Accelerator:
    """This process's accelerator: selected before, handed over by the driver, or selected now by the same rules."""
    selection = _process.selected()
    if selection is None:
        from accel.handoff import adopt_from_environment

        selection = adopt_from_environment(_process) or _process.select()
    return selection.accelerator
