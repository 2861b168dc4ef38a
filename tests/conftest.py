"""Settings for every test process, made before torch is imported."""

import os
import signal

# Several test processes share few cores: one thread each, and no spinning while waiting (see the CPU backend).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# A shell starts a background job with the interrupt ignored, and processes inherit that: tests that interrupt a run
# need it as a terminal gives it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# No test asserts wall-clock time: a busy machine must not fail a property.
settings.register_profile("accelrl", deadline=None)
settings.load_profile("accelrl")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that tests recorded, from whichever worker they come."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(value)
