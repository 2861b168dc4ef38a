"""The command line of a run: ``--config`` file and flags in, RunConfig out.

What is given later wins: defaults of the fields, then the caller's ``base``, then ``--config``, then the flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from samples.errors import InputError
from train.config.checks import validate
from train.config.command_line import CommandLine, read_command_line
from train.config.help import help_text
from train.config.home import expand_home
from train.config.problems import raise_problems
from train.config.run import RunConfig
from train.config.settings import build, check_settings
from train.config.toml_file import read_toml, to_toml, write_config

__all__ = ["parse", "parse_known", "to_toml", "uses_builtin_example", "write_config"]

# A value of the caller's base -> the flag that settles the same thing another way, and contradicts it.
_ALTERNATIVES = {
    "num_steps_per_rollout": "global_batch_size",
    "global_batch_size": "num_steps_per_rollout",
    "micro_batch_size": "use_dynamic_batch_size",
}


def parse(argv: Sequence[str], base: Mapping[str, object] | None = None) -> RunConfig:
    """The configuration that a command line means, checked as a whole.

    Args:
        argv: the arguments, without the program's name.
        base: values by field name that stand in for the fields' defaults.

    Raises:
        InputError: something given cannot be used; the message has one line for each thing.
        SystemExit: with status 0, after printing what ``--help`` or ``--print-config`` asks for.
    """
    line, explicit = _read(argv)
    typed = {setting.flag.name for setting in line.settings}
    config = expand_home(build(_yielding(base or {}, explicit) | explicit))
    validate(config, given=explicit, on_command_line=typed)
    if line.print_config:
        _print_and_exit(to_toml(config))
    return config


def parse_known(argv: Sequence[str]) -> dict[str, object]:
    """What the flags and the ``--config`` file set, by field name and nothing else; raises as ``parse`` does.

    A value that was cleared by the word none is there too, as None or ().
    """
    return _read(argv)[1]


def uses_builtin_example(explicit: Mapping[str, object]) -> bool:
    """Whether a run with these values (of ``parse_known``) names neither a model nor prompts."""
    return not explicit.get("hf_checkpoint") and not explicit.get("prompt_data")


def _yielding(base: Mapping[str, object], explicit: Mapping[str, object]) -> dict[str, object]:
    """``base`` without the values whose alternative was given."""
    given = {name for name, other in _ALTERNATIVES.items() if explicit.get(other)}
    return {name: value for name, value in base.items() if name not in given}


def _read(argv: Sequence[str]) -> tuple[CommandLine, dict[str, object]]:
    problems: list[str] = []
    line = read_command_line(argv, problems)
    if line.help:
        _print_and_exit(help_text())
    from_file = []
    if line.config is not None:
        try:
            from_file = read_toml(os.path.expanduser(line.config), problems)
        except InputError as error:
            problems.append(str(error))
    explicit = check_settings([*from_file, *line.settings], problems)
    raise_problems(problems)
    return line, explicit


def _print_and_exit(text: str) -> NoReturn:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough; Python would complain when it flushes again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
