"""One backend by name: where its factory comes from, and what is checked of a backend that it makes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accel.contract import Accelerator, Capabilities
from accel.errors import AcceleratorError

Factory = Callable[[], Accelerator]

AUTO = "auto"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TEXTS = ("name", "device_type", "ray_resource", "train_backend", "weight_update_backend")
_TEXTS_OR_NONE = ("visible_devices_env", "ray_noset_env")
_ABSENT = object()


@dataclass(frozen=True)
class Registration:
    """One name and where its factory comes from. ``target`` is "module:attribute" or the factory itself."""

    name: str
    target: str | Factory
    origin: str
    clash: str | None = None  # another installed package that claims the same name
    problem: str | None = None  # why it can never be used, in words

    def factory(self) -> Factory:
        return load_attribute(self.target) if isinstance(self.target, str) else self.target

    def make(self) -> Accelerator:
        """The backend, checked to be what its name says."""
        if self.problem:
            raise AcceleratorError(self.problem)
        if self.clash:
            raise AcceleratorError(
                f"the accelerator name {self.name!r} is claimed by {self.origin} and by {self.clash}: uninstall one, "
                f"or decide in code with register_accelerator({self.name!r}, factory, override=True)"
            )
        accelerator = make_accelerator(self.factory(), self.origin)
        if accelerator.name != self.name:
            raise AcceleratorError(
                f"{self.origin} is registered as {self.name!r} but its backend's name is {accelerator.name!r}"
            )
        return accelerator


def make_accelerator(factory: Factory, origin: str) -> Accelerator:
    """Call a factory; AcceleratorError, with its own error as the cause, when what it makes is no complete backend."""
    try:
        accelerator: Any = factory()
    except AcceleratorError:
        raise
    except (Exception, SystemExit) as error:
        raise AcceleratorError(f"{origin} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(accelerator, Accelerator):
        raise AcceleratorError(f"{origin} made a {type(accelerator).__name__}, not an accel.Accelerator")
    problems = fact_problems(accelerator)
    if problems:
        raise AcceleratorError(
            f"the backend {type(accelerator).__name__} of {origin} {'; '.join(problems)}: see docs/adding-a-backend.md"
        )
    return accelerator


def fact_problems(backend: Accelerator | type[Accelerator]) -> list[str]:
    """Declared facts that are missing or of the wrong kind, each in words."""
    problems = []
    for fact in (*_TEXTS, *_TEXTS_OR_NONE):
        value = getattr(backend, fact, _ABSENT)  # a vendor's class: what it lacks is what is looked for
        optional = fact in _TEXTS_OR_NONE
        if value is _ABSENT:
            problems.append(f"does not declare {fact}")
        elif not (optional and value is None) and not (isinstance(value, str) and value.strip()):
            problems.append(f"declares {fact} = {value!r}, expected a text{' or None' if optional else ''}")
    activity, known = backend.profiler_activity, torch.profiler.ProfilerActivity.__members__
    if activity is not None and activity not in known:
        problems.append(f"declares profiler_activity = {activity!r}, expected None or one of {', '.join(known)}")
    capabilities = getattr(backend, "capabilities", _ABSENT)
    if capabilities is _ABSENT:
        problems.append("does not declare capabilities")
    elif not isinstance(capabilities, Capabilities):
        problems.append(f"declares capabilities = {capabilities!r}, expected accel.Capabilities(...)")
    if isinstance(backend.priority, bool) or not isinstance(backend.priority, int):
        problems.append(f"declares priority = {backend.priority!r}, expected a whole number")
    return problems


def check_factory(name: str, factory: object) -> None:
    """AcceleratorError unless it is "module:attribute", or can be called and, where it is a class, is complete."""
    if isinstance(factory, str):
        if not is_target(factory):
            raise AcceleratorError(f"the factory {factory!r} of {name!r} is not written as module:attribute")
    elif not callable(factory):
        raise AcceleratorError(
            f"the factory of {name!r} is a {type(factory).__name__}: give a class or function without arguments, or "
            "its module:attribute"
        )
    elif isinstance(factory, type) and issubclass(factory, Accelerator):
        problems = fact_problems(factory)
        if problems:
            raise AcceleratorError(f"the backend {factory.__name__} of {name!r} {'; '.join(problems)}")


def is_target(text: str) -> bool:
    """Whether a text is "module:attribute"."""
    return _TARGET.fullmatch(text.strip()) is not None


def name_problem(name: str) -> str | None:
    """Why a normalized name cannot be an accelerator's; None when it can."""
    if name == AUTO or _NAME.fullmatch(name) is None:
        return (
            f"{name!r} cannot be an accelerator's name: give a letter followed by letters, digits, - and _, "
            f"other than {AUTO!r}"
        )
    return None


def described(factory: object) -> str:
    """Where a factory comes from, for people."""
    if isinstance(factory, str):
        return factory
    try:
        return f"{factory.__module__}:{factory.__qualname__}"  # type: ignore[attr-defined]
    except AttributeError:  # a functools.partial, or an object with __call__
        return repr(factory)


def load_attribute(target: str) -> Factory:
    """What "module:attribute" names; AcceleratorError with the cause when it cannot be imported."""
    module_name, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # a vendor's module may raise anything while it is imported
        raise AcceleratorError(f"cannot load the accelerator {target!r}: {type(error).__name__}: {error}") from error
    return value
