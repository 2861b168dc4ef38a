"""What the checks are given (the backend, rank processes, a way to skip by capability), and where their reports go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from accel.conformance.ranks import RankPool
from accel.contract import Accelerator

if TYPE_CHECKING:
    from accel.conformance.runner import Outcome


class ConformancePlugin:
    """Fixtures ``accelerator``, ``world_size``, ``needs`` and ``ranks``; collects one outcome a check."""

    def __init__(self, accelerator: Accelerator, world_size: int) -> None:
        self._accelerator = accelerator
        self._world_size = world_size
        self.outcomes: list[Outcome] = []

    @pytest.fixture(scope="session")
    def accelerator(self) -> Accelerator:
        return self._accelerator

    @pytest.fixture(scope="session")
    def world_size(self) -> int:
        return self._world_size

    @pytest.fixture
    def needs(self) -> Callable[..., None]:
        """``needs("streams")`` skips unless the backend declares the capability; a misspelt one is an error."""

        def check(*capabilities: str) -> None:
            for name in capabilities:
                if not getattr(self._accelerator.capabilities, name):
                    pytest.skip(f"needs the capability {name}")

        return check

    @pytest.fixture(scope="session")
    def ranks(self) -> Iterator[RankPool]:
        """The rank processes; where a device serves one rank at a time there must be one for each."""
        count = self._accelerator.device_count()
        if self._accelerator.capabilities.exclusive_devices and count < self._world_size:
            pytest.skip(f"{self._world_size} ranks need {self._world_size} exclusive_devices, and {count} are visible")
        pool = RankPool(self._accelerator, self._world_size)
        yield pool
        pool.close()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from accel.conformance.runner import Outcome

        file, _, check = report.nodeid.rpartition("::")
        subject = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        check = check.removeprefix("test_").replace("_", " ")
        if report.failed:
            self.outcomes.append(Outcome(subject, check, "FAIL", str(report.longrepr)))
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.outcomes.append(Outcome(subject, check, "SKIP", report.longrepr[2].removeprefix("Skipped: ")))
        elif report.when == "call":
            self.outcomes.append(Outcome(subject, check, "PASS"))
