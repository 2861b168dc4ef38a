"""docs/configuration.md speaks of flags, tables and values that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from train.config import slime_flags
from train.config.command_line import CONTROLS
from train.config.flags import flags, sections

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_every_flag_on_the_page_is_one_of_ours_or_of_slimes():
    ours = {flag.option for flag in flags().values()} | set(CONTROLS)
    ours |= {f"--no-{flag.option[2:]}" for flag in flags().values() if not flag.takes_value}
    theirs = {f"--{option}" for option in slime_flags.known_options()}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", PAGE)) <= ours | theirs


def test_the_tables_on_the_page_are_the_sections():
    listed = PAGE.split("named like the sections (", 1)[1].split(")", 1)[0]
    assert re.findall(r"`(\w+)`", listed) == list(sections())


def test_the_example_file_on_the_page_can_be_read():
    example = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL).group(1))
    tables = {key: value for key, value in example.items() if isinstance(value, dict)}
    keys = [*(key for key in example if key not in tables), *(key for table in tables.values() for key in table)]
    assert {key.replace("-", "_") for key in keys} <= set(flags())
    assert set(tables) <= set(sections())
