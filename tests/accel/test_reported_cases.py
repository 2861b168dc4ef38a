"""Every device case that users of such systems reported has a test that names it, so that either leads to the other.

A case is named by its public tracker and number, in a test's docstring or in the id of its parameters.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = (ROOT / "tests", ROOT / "accel" / "conformance" / "checks")

# The tracker's case -> what is right. Fix the kind, not the instance.
DEVICE_CASES = {
    "slime 111": "an id of a list that does not start at 0 becomes its local index",
    "slime 1326": "the same",
    "verl 7507": "a range in the list, while Ray's isolation is off",
    "vllm 41848": "UUIDs in the list",
    "vllm 13815": "the same",
    "slime 10": "a job of more devices than are visible ends at the start, with the variable and both numbers",
    "Megatron-LM 6897": "groups that are made and destroyed again and again leave nothing behind",
    "miles 3185": "DeepEP leaves the memory saver's region as it was",
    "torch_memory_saver 24": "expandable segments are refused where memory is to be paused",
    "slime 1936": "a memory saver without its preload is refused before workers start",
    "slime 2199": "IPv6 hosts stand in brackets",
    "slime 2151": "the same",
}


def named_cases(source: str) -> str:
    """The texts of a test module that may name a case: docstrings, and ids of parameters."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and (ast.get_docstring(node) is not None):
            is_test = isinstance(node, ast.Module) or node.name.startswith("test_")
            texts += [ast.get_docstring(node) or ""] if is_test else []
        elif isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant):
            texts.append(str(node.value.value))
    return "\n".join(texts)


@pytest.fixture(scope="module")
def named() -> str:
    files = [file for suite in SUITES for file in sorted(suite.rglob("test_*.py")) if file != Path(__file__)]
    return "\n".join(named_cases(file.read_text(encoding="utf-8")) for file in files) + "\n"


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_a_reported_case_has_a_test_that_names_it(case: str, named: str) -> None:
    ends = [named[at + len(case)] for at in range(len(named)) if named.startswith(case, at)]
    assert any(not end.isdigit() for end in ends), f"no test names {case}: {DEVICE_CASES[case]}"
