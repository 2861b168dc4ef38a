"""Runs the suite with pytest inside, and turns its reports into PASS, FAIL and SKIP lines with reasons."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accel.contract import Accelerator
from accel.errors import AcceleratorError

CHECKS = Path(__file__).parent / "checks"
MOST_RANKS = 64  # a process each


@dataclass(frozen=True)
class Outcome:
    """One check. ``reason`` says what is missing (SKIP) or what went wrong (FAIL)."""

    subject: str
    check: str
    result: Literal["PASS", "FAIL", "SKIP"]
    reason: str = ""

    def __str__(self) -> str:
        line = f"{self.result}  {self.subject}: {self.check}"
        return f"{line} ({self.reason})" if self.result == "SKIP" else line


@dataclass(frozen=True)
class ConformanceReport:
    """All outcomes of one backend."""

    accelerator: str
    world_size: int
    outcomes: tuple[Outcome, ...]

    def count(self, result: str) -> int:
        return sum(outcome.result == result for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and not self.count("FAIL")

    def text(self, *, emulated: bool = False) -> str:
        """For people: every outcome, then what went wrong in full, then the counts."""
        kind = " (emulated)" if emulated else ""
        lines = [f"conformance of {self.accelerator}{kind}, {self.world_size} ranks", *map(str, self.outcomes)]
        for outcome in self.outcomes:
            if outcome.result == "FAIL":
                lines.append(f"\n--- {outcome.subject}: {outcome.check}\n{outcome.reason}")
        lines.append(", ".join(f"{self.count(result)} {result}" for result in ("PASS", "FAIL", "SKIP")))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        counts = {result.lower(): self.count(result) for result in ("PASS", "FAIL", "SKIP")}
        return {
            "accelerator": self.accelerator,
            "world_size": self.world_size,
            "passed": self.passed,
            **counts,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def run_conformance(
    accelerator: Accelerator, world_size: int = 2, subjects: list[str] | None = None
) -> ConformanceReport:
    """Run every check (or those of some subjects: the names of the files) against a selected, live backend."""
    try:
        import pytest
    except ImportError as error:
        raise AcceleratorError("the conformance suite runs on pytest: pip install 'accelrl[conformance]'") from error
    if not 1 <= world_size <= MOST_RANKS:
        raise AcceleratorError(f"--world-size {world_size}: give the number of ranks, 1 to {MOST_RANKS}")
    from accel.conformance.plugin import ConformancePlugin

    plugin = ConformancePlugin(accelerator, world_size)
    output = io.StringIO()
    # Neither the user's pytest settings nor their plugins are part of the suite.
    arguments = ["-c", os.devnull, "--rootdir", str(CHECKS), "--noconftest", "-p", "no:cacheprovider", "--tb=short"]
    with _no_plugin_autoload(), contextlib.redirect_stdout(output):
        status = pytest.main([*arguments, *_files(subjects)], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise AcceleratorError(
            f"the conformance suite could not run (pytest status {int(status)}):\n{output.getvalue()}"
        )
    return ConformanceReport(accelerator.name, world_size, tuple(plugin.outcomes))


def subject_names() -> list[str]:
    """Subjects that can be asked for."""
    return sorted(path.stem.removeprefix("test_") for path in CHECKS.glob("test_*.py"))


def _files(subjects: list[str] | None) -> list[str]:
    known = subject_names()
    unknown = [subject for subject in subjects or () if subject not in known]
    if unknown:
        raise AcceleratorError(f"no subject is named {unknown[0]!r}: choose among {', '.join(known)}")
    return [str(CHECKS / f"test_{subject}.py") for subject in subjects or known]


@contextlib.contextmanager
def _no_plugin_autoload() -> Iterator[None]:
    name = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
