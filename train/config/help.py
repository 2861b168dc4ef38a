"""The text of ``--help``: flags grouped by concern, each with what it takes, its bounds and its default."""

from __future__ import annotations

import shutil
import textwrap

from train.config.flags import NONE, Flag, flags, sections

_INTRO = """\
usage: python -m train [--config FILE.toml] [--flag VALUE ...]
       python -m train inspect DIR         what would be built from a model directory
       python -m train export --load DIR --to DIR         a checkpoint's model as a Hugging Face directory

Reinforcement learning of a language model. With no flags it trains a small built-in example; with --hf-checkpoint and
--prompt-data it trains that model on those prompts.

  --config FILE.toml    read settings from a file: the flags' names, flat or in tables; flags given here win
  --print-config        print the resolved configuration as TOML and stop
  --help, -h            print this and stop
"""

_OUTRO = f"""
A switch is turned off by --no-NAME. The word {NONE} clears an optional value or a list. A list is given as --flag A B,
and repeating the flag appends. "gpus" in a name means devices of the selected accelerator. The built-in example has
defaults of its own: --print-config shows them. docs/configuration.md says more.
"""


def help_text() -> str:
    width = min(max(shutil.get_terminal_size((110, 24)).columns, 70), 120)
    parts = [_INTRO]
    for section, model in sections().items():
        parts.append(f"\n{(model.__doc__ or section).strip()}\n")
        parts.extend(_flag_text(flag, width) for flag in flags().values() if flag.section == section)
    parts.append(_OUTRO)
    return "".join(parts)


def _flag_text(flag: Flag, width: int) -> str:
    head = f"  {flag.option} {_value_text(flag)}".rstrip()
    notes = "; ".join(note for note in (flag.bounds, _default_text(flag)) if note)
    text = f"{flag.info.description} [{notes}]" if notes else str(flag.info.description)
    return head + "\n" + textwrap.fill(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8) + "\n"


def _value_text(flag: Flag) -> str:
    if not flag.takes_value:
        return f"| --no-{flag.option[2:]}"
    one = "{" + ",".join(flag.choices) + "}" if flag.choices else {int: "INT", float: "NUMBER", str: "TEXT"}[flag.kind]
    return f"{one} [{one} ...]" if flag.many else one


def _default_text(flag: Flag) -> str:
    """The default, unless it is None or empty and the description says in words what then happens."""
    default = flag.default
    if default is None or default == ():
        return "" if "(default:" in str(flag.info.description) else f"default: {NONE}"
    if isinstance(default, bool):
        return "default: on" if default else "default: off"
    return f"default: {default}"
