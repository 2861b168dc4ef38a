"""The guide names every fact and capability of the contract, and nothing that is not there."""

import dataclasses
import re
from pathlib import Path

from accel import Accelerator, Capabilities
from accel.conformance.runner import subject_names

GUIDE = (Path(__file__).parents[2] / "docs" / "adding-a-backend.md").read_text()
FACTS = [name for name, kind in Accelerator.__annotations__.items() if "ClassVar" in kind]
# Said in the guide's prose, or set by accelrl itself.
ELSEWHERE = {"capabilities", "emulated", "name", "device_type"}


def test_every_fact_and_capability_is_in_the_guide():
    named = set(re.findall(r"\w+", GUIDE))
    assert set(FACTS) - ELSEWHERE <= named
    assert {field.name for field in dataclasses.fields(Capabilities)} <= named


def test_every_method_that_the_guide_names_exists():
    methods = set(re.findall(r"`(\w+)\(\w*\)`", GUIDE))
    assert methods
    assert methods <= set(dir(Accelerator))


def test_every_subject_of_the_suite_is_explained():
    rows = set(re.findall(r"^\| (\w+) \| ", GUIDE, re.MULTILINE))
    assert set(subject_names()) <= rows
