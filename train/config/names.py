"""Finds the flag that a word means, or says which one was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from train.config import slime_flags
from train.config.flags import flags


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that looks most like the one given (dashes, underscores and case aside), if any does."""
    plain = {w.lower().replace("-", "").replace("_", ""): w for w in words}
    found = difflib.get_close_matches(word.lower().replace("-", "").replace("_", ""), plain, n=1, cutoff=0.7)
    return plain[found[0]] if found else None


def unknown_option(option: str, controls: Iterable[str] = ()) -> str:
    """The message about ``--option``, which is no flag of ours. ``controls`` are options beside RunConfig's fields."""
    word = option.removeprefix("--")
    reason = slime_flags.reason(word)
    if reason:
        return f"{option}: slime's flag, not one of accelrl's: {reason}"
    ours = [flag.option for flag in flags().values()]
    switches = ["--no-" + flag.option[2:] for flag in flags().values() if not flag.takes_value]
    meant = nearest(option, [*ours, *switches, *controls])
    return f"{option}: unknown flag; " + (f"did you mean {meant}?" if meant else "--help lists them all")


def unknown_key(key: str, section: str | None = None) -> str:
    """The message about a key of a configuration file that is no field of ours."""
    reason = slime_flags.reason(key.replace("_", "-"))
    if reason:
        return f"slime's setting, not one of accelrl's: {reason}"
    meant = nearest(key, [name for name, flag in flags().items() if section in (None, flag.section)] or flags())
    meant = meant or nearest(key, flags())
    return "unknown key; " + (f"did you mean {meant}?" if meant else "--help lists them all")
