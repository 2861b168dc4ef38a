"""Which arguments a hook's signature asks for, worked out once when it is loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hooks.context import current_rollout_id
from samples import InputError, Sample

FLAG = "--rollout-sample-hook-path"
CONTEXT_NAMES = ("rollout_id", "evaluation", "group_index", "weight_version")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class BoundHook:
    """A hook and how to call it: ``function(args, sample, *positional, **keywords)``."""

    path: str
    function: Callable[..., Any]
    positional: tuple[str, ...]  # context that follows args and sample and can only be given by position
    keywords: tuple[str, ...]  # context given by name
    takes_all: bool  # **kwargs: whatever else the caller passed goes along
    withheld: frozenset[str]  # names that **kwargs must not get: taken already

    def call(self, args: Any, sample: Sample, context: Mapping[str, Any]) -> Any:
        """The hook's answer for one sample; of an async hook, the awaitable."""
        if not (self.positional or self.keywords or self.takes_all):
            return self.function(args, sample)
        positional = [_value(name, sample, context) for name in self.positional]
        names = [name for name in self.keywords if name in context or name in CONTEXT_NAMES]
        if self.takes_all:
            names += [name for name in (*CONTEXT_NAMES, *context) if name not in names and name not in self.withheld]
        return self.function(args, sample, *positional, **{name: _value(name, sample, context) for name in names})


def bind_hook(path: str, function: Callable[..., Any]) -> BoundHook:
    """Inspect ``function``. Raises InputError if it cannot be called as a hook, naming what is wrong."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # written in C, without a signature
        return BoundHook(path, function, (), (), takes_all=False, withheld=frozenset())
    kinds = {parameter.kind for parameter in parameters}
    leading = [parameter for parameter in parameters if parameter.kind in _POSITIONAL][:2]
    if len(leading) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        signature = inspect.signature(function)
        raise InputError(f"{FLAG} {path}: takes {signature}; a hook takes (args, sample), in that order")
    rest = [parameter for parameter in parameters if parameter not in leading]
    bound = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    for parameter in rest:
        _check_obtainable(path, parameter, bound)
    positional = _leading_context([p for p in rest if p.kind is inspect.Parameter.POSITIONAL_ONLY])
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = tuple(p.name for p in rest if p.kind in named and p.name not in bound)
    by_name = {p.name for p in leading if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return BoundHook(
        path,
        function,
        positional,
        keywords,
        takes_all=inspect.Parameter.VAR_KEYWORD in kinds,
        withheld=bound | by_name | frozenset(positional),
    )


def _leading_context(parameters: list[inspect.Parameter]) -> tuple[str, ...]:
    """The positional-only parameters that can be filled: those before the first that is no context."""
    names: list[str] = []
    for parameter in parameters:
        if parameter.name not in CONTEXT_NAMES:
            break
        names.append(parameter.name)
    return tuple(names)


def _check_obtainable(path: str, parameter: inspect.Parameter, bound: frozenset[str]) -> None:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if variadic or parameter.default is not inspect.Parameter.empty or parameter.name in bound:
        return
    if parameter.name not in CONTEXT_NAMES:
        raise InputError(
            f"{FLAG} {path}: requires an argument {parameter.name!r}; beside args and sample a hook can have "
            f"{', '.join(CONTEXT_NAMES)}, and anything else needs a default"
        )


def _value(name: str, sample: Sample, context: Mapping[str, Any]) -> Any:
    """What the caller passed comes first; what it did not pass stands on the sample."""
    if name in context:
        return context[name]
    if name == "rollout_id":
        return current_rollout_id() if sample.rollout_id is None else sample.rollout_id
    if name == "evaluation":
        return False
    return sample.group_index if name == "group_index" else sample.weight_version
