"""Every combination of flag, variable, and backends that are usable, not usable or broken: a choice or an error."""

from itertools import product

import pytest

from accel import AcceleratorError
from accel.registry import ACCELERATOR_ENV, Registry
from tests.accel.fake_backends import fake

STATES = ("absent", "usable", "unusable", "raises")
CHOICES = (None, "auto", "cpu", "acme", "bolt", "unknown")
CASES = list(product(CHOICES, CHOICES, STATES, STATES, (90, 50)))


def build(variable: str | None, acme: str, bolt: str, bolt_priority: int) -> Registry:
    """cpu at priority 0, acme at 50, bolt above it or level with it."""
    registry = Registry({} if variable is None else {ACCELERATOR_ENV: variable}, list)
    for name, state, priority in (("acme", acme, 50), ("bolt", bolt, bolt_priority)):
        if state != "absent":
            reason = "no card" if state == "unusable" else None
            error = OSError("driver broke") if state == "raises" else None
            registry.register(name, fake(name, priority=priority, reason=reason, error=error))
    return registry


def documented(flag: str | None, variable: str | None, acme: str, bolt: str, bolt_priority: int) -> str:
    """The rule in words: the name chosen, or "error: " and what the message must say."""
    explicit = [choice for choice in (flag, variable) if choice not in (None, "auto")]
    if len(set(explicit)) == 2:
        return "error: disagree"
    if explicit:
        state = {"cpu": "usable", "acme": acme, "bolt": bolt, "unknown": "absent"}[explicit[0]]
        messages = {"absent": "no accelerator is named", "unusable": "no card", "raises": "driver broke"}
        return explicit[0] if state == "usable" else f"error: {messages[state]}"
    if acme == bolt == "usable":
        return "bolt" if bolt_priority > 50 else "error: equal priority"
    return "acme" if acme == "usable" else "bolt" if bolt == "usable" else "cpu"


def outcome(registry: Registry, flag: str | None) -> str:
    try:
        return registry.select(flag).accelerator.name
    except AcceleratorError as error:
        return f"error: {error}"


def test_every_combination_gives_the_documented_choice_or_error():
    for flag, variable, *states in CASES:
        got = outcome(build(variable, *states), flag)
        wanted = documented(flag, variable, *states)
        case = f"flag={flag} variable={variable} acme, bolt, priority={states}"
        if wanted.startswith("error: "):
            assert got.startswith("error: "), case
            assert wanted.removeprefix("error: ") in got, case
        else:
            assert got == wanted, case


def test_no_combination_ends_on_cpu_after_a_choice_of_something_else():
    for flag, variable, *states in CASES:
        asked = {choice for choice in (flag, variable) if choice not in (None, "auto")}
        if asked and asked != {"cpu"}:
            assert outcome(build(variable, *states), flag) != "cpu"


def test_a_disagreement_names_both():
    with pytest.raises(AcceleratorError, match=r"--accelerator cpu and ACCELRL_ACCELERATOR=acme"):
        build("acme", "usable", "absent", 90).select("cpu")


def test_an_empty_variable_and_odd_spelling_are_understood():
    assert outcome(build("  ", "usable", "absent", 90), None) == "acme"
    assert outcome(build(" ACME ", "usable", "absent", 90), "Acme") == "acme"
