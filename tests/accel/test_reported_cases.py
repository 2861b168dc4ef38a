"""Every case of devices, weights, memory and process groups that users of such systems reported has a test that names
it, so that either leads to the other.

A case is named by its public tracker and number, in a test's docstring or in the id of its parameters.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = (ROOT / "tests", ROOT / "accel" / "conformance" / "checks")

# The tracker's case -> what is right. Fix the kind, not the instance.
CASES = {
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
    # weights, memory and process groups
    "slime 2095": "a group that is rebuilt has its own time limit and options",
    "trl 6797": "a weight update has a time limit, and its error the engine's own words",
    "slime 2134": "a rank with nothing to send takes part in every collective",
    "vllm 51665": "a head that the engine unties is never left as it was",
    "slime 2256": "a block of zeros in FP8 has a scale that divides",
    "slime 1799": "experts have global ids",
    "slime 2280": "a shard is not taken for a whole tensor",
    "skyrl 1737": "many buckets of a mixture of experts change nothing where nothing changed",
    "slime 2373": "hosts measure their own addresses",
    "torch_memory_saver 71": "weights that were on the host come back bit for bit",
    "slime 579": "released memory is free, within a time limit, or both sides' figures are told",
    "verl 6448": "ports are held until they are bound",
}


def named_cases(source: str) -> str:
    """The texts of a test module that may name a case: docstrings, and ids of parameters."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            is_test = isinstance(node, ast.Module) or node.name.startswith("test_")
            texts += [ast.get_docstring(node) or ""] if is_test else []
        elif isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant):
            texts.append(str(node.value.value))
    return "\n".join(texts)


@pytest.fixture(scope="module")
def named() -> str:
    files = [file for suite in SUITES for file in sorted(suite.rglob("test_*.py")) if file != Path(__file__)]
    return "\n".join(named_cases(file.read_text(encoding="utf-8")) for file in files) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_a_reported_case_has_a_test_that_names_it(case: str, named: str) -> None:
    ends = [named[at + len(case)] for at in range(len(named)) if named.startswith(case, at)]
    assert any(not end.isdigit() for end in ends), f"no test names {case}: {CASES[case]}"
