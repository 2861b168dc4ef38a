"""Reads ci/matrix.toml: the jobs, checked."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / "ci" / "matrix.toml"
NO_HARDWARE = "none"


@dataclass(frozen=True)
class Job:
    """One job; the fields are explained at the top of the file."""

    name: str
    accelerator: str
    hardware: str
    commands: list[str]
    markers: list[str] = field(default_factory=list)
    tests: str = "tests"
    environment: dict[str, str] = field(default_factory=dict)
    runs_on: list[str] = field(default_factory=lambda: ["ubuntu-latest"])

    @property
    def needs_hardware(self) -> bool:
        return self.hardware != NO_HARDWARE

    def all_commands(self) -> list[str]:
        """What the job runs, in order; tests in parallel, those that start processes themselves two at a time."""
        suites = []
        for expression in self.markers:
            at_once = "auto" if expression.startswith("not slow") else "2"
            if expression.startswith("slow"):
                at_once += " --dist loadfile"  # files share models that they made
            suites.append(f'python -m pytest -n {at_once} -m "{expression}" {self.tests}')
        return [*self.commands, *suites]


def load(path: Path = MATRIX) -> dict[str, Job]:
    """Jobs by name, in the file's order; an unknown field is a TypeError that names it."""
    return {name: Job(name=name, **fields) for name, fields in tomllib.loads(path.read_text())["jobs"].items()}
