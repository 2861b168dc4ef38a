"""How a user's function is called: worked out, and a wrong one refused, when it is loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samples.errors import InputError
from samples.loading import load_function

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Contract:
    """What a function given by ``flag`` is called with: ``positional`` in this order, and of ``keywords`` those that
    its signature names. ``example`` is a signature that fits; ``must_be_async``: only ``async def`` will do;
    ``must_be_plain``: it will not."""

    flag: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    example: str
    must_be_async: bool = False
    must_be_plain: bool = False


@dataclass(frozen=True)
class UserFunction:
    """A loaded function that fits its contract."""

    path: str
    function: Callable[..., Any]
    keywords: frozenset[str]  # that it takes
    is_async: bool

    def call(self, *positional: Any, **available: Any) -> Any:
        """The function's answer; of an async one, the awaitable."""
        return self.function(*positional, **{name: available[name] for name in available if name in self.keywords})


def load_user_function(path: str, contract: Contract, user_code_dir: str | None = None) -> UserFunction:
    """The function at ``path``. Raises InputError that names the flag and what the signature lacks or asks too much."""
    return bind_function(path, load_function(path, contract.flag, user_code_dir), contract)


def bind_function(path: str, function: Callable[..., Any], contract: Contract) -> UserFunction:
    """As ``load_user_function``, for a function that is there."""
    if contract.must_be_async and not is_coroutine_function(function):
        raise InputError(
            f"{contract.flag} {path}: is a plain function, which would hold up every other response; write "
            f"async def {contract.example}"
        )
    if contract.must_be_plain and is_coroutine_function(function):
        raise InputError(
            f"{contract.flag} {path}: is async, and nothing awaits it; write def {contract.example}, and do what has "
            "to be waited for in a reward or a sample hook"
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a signature
        return UserFunction(path, function, frozenset(), is_async=is_coroutine_function(function))
    parameters = list(signature.parameters.values())
    told = f"{contract.flag} {path}{signature}"
    ours = _taken_by_position(parameters, contract, told)
    keywords = _keywords(parameters, ours, function, contract, told)
    return UserFunction(path, function, keywords, is_async=is_coroutine_function(function))


def is_coroutine_function(function: Any) -> bool:
    """True for an async function, method, partial of one, or an object whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _taken_by_position(parameters: list[inspect.Parameter], contract: Contract, told: str) -> set[str]:
    """The names of the parameters that ``contract.positional`` fill."""
    places = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if len(places) < len(contract.positional) and not takes_any:
        lacking = ", ".join(contract.positional[len(places) :])
        raise InputError(f"{told}: lacks {lacking}; it is called as {contract.example}")
    return set(places[: len(contract.positional)])


def _keywords(
    parameters: list[inspect.Parameter], ours: set[str], function: Any, contract: Contract, told: str
) -> frozenset[str]:
    bound = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    taken: set[str] = set()
    for parameter in parameters:
        if parameter.name in ours or parameter.name in bound:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            taken |= set(contract.keywords) - ours - bound
        elif parameter.kind in _VARIADIC:
            continue
        elif parameter.name in contract.keywords and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            taken.add(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            offered = f"beside those it can have {', '.join(contract.keywords)}" if contract.keywords else "no more"
            raise InputError(
                f"{told}: requires {parameter.name!r}; it is called as {contract.example}, {offered}, and anything "
                "else needs a default"
            )
    return frozenset(taken)
