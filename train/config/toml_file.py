"""Configuration files: TOML with the flags' names, flat or in tables named like the sections of RunConfig."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

from samples.errors import InputError
from train.config.flags import NONE, flags, sections
from train.config.names import nearest, unknown_key
from train.config.run import RunConfig
from train.config.settings import Setting

FACTS_TABLE = "run"  # what a run writes about itself; reading ignores it


def read_toml(path: str, problems: list[str]) -> list[Setting]:
    """The settings in a file. Unusable keys are appended to ``problems``; an unreadable file raises InputError."""
    text = _read_text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from error
    settings: dict[str, Setting] = {}
    for key, value, section in _entries(document, path, text, problems):
        name = key.replace("-", "_")
        where = _where(path, text, key)
        if name not in flags():
            problems.append(f"{where}: {unknown_key(key, section)}")
        elif section not in (None, flags()[name].section):
            problems.append(f"{where}: stands in [{section}] but belongs in [{flags()[name].section}]")
        elif name in settings:
            problems.append(f"{where}: given more than once in this file")
        else:
            settings[name] = Setting(flags()[name], value, f"{where} =")
    return list(settings.values())


def to_toml(config: RunConfig) -> str:
    """The whole configuration as TOML, one table a section; reading it back gives an equal RunConfig."""
    document = {
        section: {
            name: NONE if value is None else list(value) if isinstance(value, tuple) else value
            for name, value in getattr(config, section)  # a model iterates over (field, value)
        }
        for section in sections()
    }
    return tomli_w.dumps(document)


def write_config(config: RunConfig, path: str | Path, facts: Mapping[str, object]) -> None:
    """Writes a run's config.toml: the resolved configuration, and ``facts`` (TOML values by name) in a table that
    ``--config`` ignores. The file appears whole or not at all."""
    header = (
        "# The configuration of a run, resolved: --config with this file makes the run again, in a new directory.\n"
        "# Where this run wrote and what it resumed stands in [run], which --config ignores.\n\n"
    )
    notes = {key: NONE if value is None else value for key, value in facts.items()}
    table = tomli_w.dumps({FACTS_TABLE: notes}) if notes else ""
    path = Path(path)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(f"{header}{to_toml(config)}\n{table}".rstrip("\n") + "\n", encoding="utf-8")
    unfinished.replace(path)


def _entries(
    document: Mapping[str, object], path: str, text: str, problems: list[str]
) -> Iterator[tuple[str, object, str | None]]:
    """(key, value, section or None) of each setting in the file."""
    for key, value in document.items():
        if key == FACTS_TABLE and isinstance(value, dict):
            continue
        if key in sections() and isinstance(value, dict):
            yield from ((name, inner, key) for name, inner in value.items())
        elif isinstance(value, dict) and key.replace("-", "_") not in flags():
            meant = nearest(key, sections())
            hint = f"did you mean [{meant}]?" if meant else "the tables are " + ", ".join(f"[{s}]" for s in sections())
            problems.append(f"{path}: [{key}] is no table of settings; {hint}")
        elif key in sections() and key not in flags():
            problems.append(
                f"{_where(path, text, key)}: is a table of settings: write [{key}] and the settings below it"
            )
        else:
            yield key, value, None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--config {path}: not UTF-8 text (byte {error.start}); TOML files are") from error
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read: {error.strerror}") from error


def _where(path: str, text: str, key: str) -> str:
    """``run.toml line 3: lr``: tomllib gives no lines, so the key is looked for where a key may stand."""
    pattern = re.compile(rf"""(?:^|[.{{,\s])["']?{re.escape(key)}["']?\s*=""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line.split("#", 1)[0]):
            return f"{path} line {number}: {key}"
    return f"{path}: {key}"
