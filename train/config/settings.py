"""Values as they were given, checked one by one, and put together into a RunConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from train.config.flags import NONE, Flag, flags, sections
from train.config.problems import raise_problems, value_problem
from train.config.run import RunConfig


@dataclass(frozen=True)
class Setting:
    """A value that somebody gave for a flag."""

    flag: Flag
    value: object
    origin: str  # as messages show it: "--lr", or "run.toml line 3: lr ="
    typed: bool = True  # a value with a type (TOML); else the text of a command line


def check_settings(settings: Iterable[Setting], problems: list[str]) -> dict[str, object]:
    """Values by field name, of the field's type and within its bounds; a later setting replaces an earlier one.

    What is wrong is appended to ``problems``, one line each.
    """
    values: dict[str, object] = {}
    for setting in settings:
        flag, value = setting.flag, _cleared(setting)
        if flag.many and isinstance(value, list):
            value = tuple(value)
        try:
            values[flag.name] = flag.adapter.validate_python(value, strict=setting.typed)
        except ValidationError as error:
            problems.append(value_problem(setting.origin, flag, value, error.errors()[0]["loc"]))
    return values


def build(values: Mapping[str, object]) -> RunConfig:
    """The configuration with these values by field name, and defaults for the rest. KeyError: no such field."""
    by_section: dict[str, dict[str, object]] = {section: {} for section in sections()}
    for name, value in values.items():
        by_section[flags()[name].section][name] = value
    problems: list[str] = []
    built = {}
    for section, model in sections().items():
        try:
            built[section] = model.model_validate(by_section[section])
        except ValidationError as error:
            for one in error.errors():
                flag = flags()[str(one["loc"][0])]
                problems.append(value_problem(flag.option, flag, values[flag.name], one["loc"][1:]))
    raise_problems(problems)
    return RunConfig.model_validate(built)


def _cleared(setting: Setting) -> object:
    """The value, with the word that clears an optional value or a list replaced by what it means."""
    flag, value = setting.flag, setting.value
    if flag.optional and value == NONE:
        return None
    if flag.many and value in (NONE, (NONE,), [NONE]):
        return ()
    return value
