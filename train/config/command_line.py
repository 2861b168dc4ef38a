"""Splits a command line into settings. Names are never abbreviated, and nothing unknown is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from train.config.flags import NONE, Flag, flags
from train.config.names import unknown_option
from train.config.settings import Setting
from train.config.slime_flags import ALIASES

CONTROLS = ("--config", "--print-config", "--help")


@dataclass
class CommandLine:
    settings: list[Setting] = field(default_factory=list)  # one a field, in the order of their last mention
    config: str | None = None
    print_config: bool = False
    help: bool = False


def read_command_line(argv: Sequence[str], problems: list[str]) -> CommandLine:
    """Reads ``--flag VALUE``, ``--flag=VALUE``, ``--switch``, ``--no-switch`` and ``--list A B``.

    A flag given twice takes the later value; a list given twice is appended to. What cannot be read is appended to
    ``problems``, one line each.
    """
    line = CommandLine()
    given: dict[str, Setting] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "-h" or not word.startswith("--") or word == "--":
            _read_bare_word(word, line, problems)
            continue
        option, equals, attached = word.partition("=")
        values = [attached] if equals else []
        while not equals and rest and not rest[0].startswith("--") and rest[0] != "-h":
            values.append(rest.pop(0))
        if option in CONTROLS:
            _read_control(option, values, line, problems)
        else:
            setting = _read_option(option, values, bool(equals), problems)
            if setting is not None:
                _keep(setting, given)
    line.settings = list(given.values())
    return line


def _read_bare_word(word: str, line: CommandLine, problems: list[str]) -> None:
    if word == "-h":
        line.help = True
    else:
        problems.append(f"{word}: not expected here; every argument belongs to a --flag")


def _read_control(option: str, values: list[str], line: CommandLine, problems: list[str]) -> None:
    match option, values:
        case "--config", [path] if line.config is None:
            line.config = path
        case "--config", [_]:
            problems.append("--config: given twice; one file is read")
        case "--config", _:
            problems.append(f"--config: takes one file, got {' '.join(values) or 'none'}")
        case "--print-config", []:
            line.print_config = True
        case "--help", []:
            line.help = True
        case _:
            problems.append(f"{option}: takes no value, got {' '.join(values)}")


def _read_option(option: str, values: list[str], attached: bool, problems: list[str]) -> Setting | None:
    flag, preset = _find(option)
    if flag is None:
        problems.append(unknown_option(option, CONTROLS))
    elif preset is not None:
        if not values:
            return Setting(flag, preset, option)
        if attached and preset is True and not option.startswith("--no-"):
            return _read_switch(flag, option, values[0], problems)
        off = f"; use --no-{option[2:]} to switch it off" if preset is True else ""
        problems.append(f"{option}: takes no value, got {' '.join(values)}{off}")
    elif flag.many:
        if values:
            return Setting(flag, tuple(values), option, typed=False)
        problems.append(f"{option}: needs at least one value; '{NONE}' empties the list")
    elif len(values) == 1:
        return Setting(flag, values[0], option, typed=False)
    elif values:
        problems.append(f"{option}: takes one value, got {' '.join(values)}")
    else:
        problems.append(f"{option}: needs a value: {flag.expects} (one that begins with -- is written {option}=VALUE)")
    return None


def _find(option: str) -> tuple[Flag | None, object]:
    """The flag that an option means, and the value that the option alone gives it (None: the value follows)."""
    word = option[2:]
    if word in ALIASES:
        name, value = ALIASES[word]
        return flags()[name], value
    by_option = {flag.option: flag for flag in flags().values()}
    if option in by_option:
        flag = by_option[option]
        return flag, None if flag.takes_value else True
    positive = by_option.get("--" + word.removeprefix("no-"))
    if positive is not None and not positive.takes_value:
        return positive, False
    return None, None


def _read_switch(flag: Flag, option: str, text: str, problems: list[str]) -> Setting | None:
    words = {"true": True, "false": False} | ({NONE: None} if flag.optional else {})
    if text.lower() in words:
        return Setting(flag, words[text.lower()], option)
    problems.append(f"{option}={text}: must be {flag.expects}")
    return None


def _keep(setting: Setting, given: dict[str, Setting]) -> None:
    """Replaces an earlier setting of the flag, or appends to it where the flag is a list."""
    name = setting.flag.name
    earlier = given.pop(name, None)
    if earlier is not None and setting.flag.many and (NONE,) not in (earlier.value, setting.value):
        values = (*_items(earlier.value), *_items(setting.value))
        setting = Setting(setting.flag, values, setting.origin, typed=False)
    given[name] = setting


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
