"""The guide names every fact, capability and method of the contract, and nothing that is not there."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch

from accel import Accelerator, Capabilities, accelerator_spec
from accel.conformance.runner import subject_names
from accel.registration import Registration
from accel.registry import ENTRY_POINT_GROUP, Registry

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "adding-a-backend.md").read_text(encoding="utf-8")
SURFACE = GUIDE.split("## The whole surface", 1)[1].split("\n## ", 1)[0]
ROWS = {
    what: (kinds, names)
    for what, kinds, names in re.findall(r"^\| (?!what is|-)(.+?) \| (.+?) \| (.+) \|$", SURFACE, re.MULTILINE)
}
FACTS = {name for name, kind in Accelerator.__annotations__.items() if "ClassVar" in kind} - {"capabilities"}
CAPABILITIES = {field.name for field in dataclasses.fields(Capabilities)}
METHODS = {name for name, _ in inspect.getmembers(Accelerator, inspect.isfunction) if not name.startswith("_")}
OF_THE_CONTRACT_ITSELF = {"require"}

# What public ports had to touch -> a word of the guide's row about it.
PORTS_TOUCHED = {
    "process start": "set before Python starts",
    "leftover masks": "other masks",
    "Ray": "what Ray is asked for",
    "device objects": "device objects",
    "init_process_group, barrier": "process groups, barriers",
    "weight update": "weight updates",
    "memory": "memory figures",
    "allocator settings": "allocator settings",
    "snapshot, history, OOM observer": "memory history, snapshot, OOM observer",
    "streams": "streams and events",
    "profiler": "profiler",
    "files": "files read onto the device",
    "identity": "identity of a card",
    "affinity and health": "affinity and health",
    "autocast, bf16": "mixed precision",
    "fp32 logits": "fp32 logits",
    "deterministic flags": "deterministic flags",
    "kernels": "kernels, present or not",
    "model initialisation": "where a model is built",
    "SGLang": "rollout servers",
    "environment passed on": "variables that differ between nodes",
}


def kind_of(name: str) -> str | None:
    """What a name in the table is; None for one that is only said beside: a file, a flag, a call of torch."""
    bare = name.removesuffix("()")
    if bare in METHODS and name.endswith("()"):
        return "method"
    if bare in FACTS:
        return "fact"
    if bare in CAPABILITIES:
        return "capability"
    if name.startswith("accel."):
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name
        return "accel function"
    assert re.match(r"[A-Z_]+=|--|[\w]+/|torch\.", name), f"the guide names {name}, which the contract does not have"
    return None


def test_every_fact_capability_and_method_is_in_the_table() -> None:
    named = {name.removesuffix("()") for _, names in ROWS.values() for name in re.findall(r"`([^`]+)`", names)}
    missing = (FACTS | CAPABILITIES | METHODS) - named - OF_THE_CONTRACT_ITSELF
    assert not missing


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_its_names_are(row: str) -> None:
    kinds, names = ROWS[row]
    found = {kind for name in re.findall(r"`([^`]+)`", names) if (kind := kind_of(name)) is not None}
    assert found == set(kinds.split(", "))


@pytest.mark.parametrize("touched", PORTS_TOUCHED)
def test_what_ports_had_to_touch_has_a_row(touched: str) -> None:
    assert any(PORTS_TOUCHED[touched] in row for row in ROWS)


def called(pattern: str, folder: str, *left_out: str) -> set[str]:
    """Methods of the contract whose call fits the pattern somewhere in a folder."""
    files = [
        path for path in (ROOT / folder).rglob("*.py") if not path.relative_to(ROOT).as_posix().startswith(left_out)
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return {name for name in METHODS if re.search(pattern.format(name), text)}


def test_a_method_that_no_run_calls_is_tried_by_the_suite_and_the_guide_says_what_for() -> None:
    an_accelerator = r"(?<!torch\.)(?:accelerator|backend|\ba|make\(\)|chosen)\.{}\b"
    own = r"self\.{}\("
    suite = called(an_accelerator, "accel/conformance")
    runtime = called(own, "accel/backends") | set(re.findall(r"self\.(\w+)\(", inspect.getsource(Accelerator)))
    for folder in ("accel", "train", "rollout"):
        runtime |= called(an_accelerator, folder, "accel/conformance", "accel/backends", "accel/emulation")
    explained = set(re.findall(r"`(\w+)\(\)`", SURFACE.rsplit("|\n\n", 1)[1]))
    assert METHODS - runtime == explained
    assert explained <= suite


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guides_own_backend_is_complete_and_says_why_it_is_not_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed to the letter: its files, its entry point, on a machine without the vendor's plugin."""
    project = tomllib.loads(code_blocks("toml")[0])
    ((name, target),) = project["project"]["entry-points"][ENTRY_POINT_GROUP].items()
    module = target.partition(":")[0]
    file = tmp_path / (module.replace(".", "/") + ".py")
    file.parent.mkdir()
    file.write_text(code_blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    assert project["tool"]["setuptools"]["packages"] == [module.partition(".")[0]]
    assert project["build-system"]
    assert project["project"]["version"]
    registry = Registry({}, lambda: [Registration(name, target, "the guide")])
    probe = registry.probe(name)
    assert probe.accelerator is not None, probe.reason
    assert probe.reason == (f"torch_acme is not installed: install the vendor's build for torch {torch.__version__}")
    assert accelerator_spec(probe.accelerator, registry).startswith(f"{name}={target}@src-")


def test_every_subject_of_the_suite_is_explained() -> None:
    rows = set(re.findall(r"^\| (\w+) \| ", GUIDE, re.MULTILINE))
    assert set(subject_names()) <= rows
