"""Asks one backend whether it is usable, and survives what its vendor's code does meanwhile."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.registration import Registration

PROBE_TIMEOUT_ENV = "ACCELRL_PROBE_TIMEOUT"
PROBE_TIMEOUT = 60.0  # seconds: a node whose driver is not kept loaded takes tens of them


@dataclass(frozen=True)
class Probe:
    """What asking one backend gave: usable when there is no reason against it; what it raised, if it raised."""

    registration: Registration
    accelerator: Accelerator | None
    reason: str | None
    error: BaseException | None = None

    @property
    def usable(self) -> bool:
        return self.reason is None


def probe(registration: Registration, timeout: float) -> Probe:
    """Make the backend, prepare it and ask it, in a thread that is left behind after ``timeout`` seconds.

    Everything that it raises (also SystemExit) is kept in the answer; what it prints goes to standard error.
    """
    answers: list[Probe] = []
    thread = threading.Thread(
        target=lambda: answers.append(_ask(registration)), name=f"accelrl-probe-{registration.name}", daemon=True
    )
    with _stdout_to_stderr():
        thread.start()
        thread.join(timeout)
    if answers:
        return answers[0]
    reason = f"it did not answer within {timeout:g} s ({PROBE_TIMEOUT_ENV}=SECONDS allows more)"
    return Probe(registration, None, reason, TimeoutError(reason))


def probe_timeout(value: str | None) -> float:
    """Seconds that one probe may take, from the variable's value."""
    if value is None or not value.strip():
        return PROBE_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise AcceleratorError(f"{PROBE_TIMEOUT_ENV}={value!r}: give a number of seconds above 0")
    return seconds


def _ask(registration: Registration) -> Probe:
    accelerator: Accelerator | None = None
    try:
        accelerator = registration.make()
        accelerator.prepare()
        return Probe(registration, accelerator, accelerator.unavailable_reason())
    except BaseException as error:  # noqa: BLE001 - a vendor's code may raise anything: kept, shown, chained
        text = (
            str(error) if isinstance(error, AcceleratorError) else f"its probe raised {type(error).__name__}: {error}"
        )
        return Probe(registration, accelerator, text, error)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """For Python and for libraries in C: a vendor's banner must not end up in JSON that a command prints."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            saved = os.dup(1)
        except OSError:  # this process has no standard output
            yield
            return
        try:
            with contextlib.suppress(OSError):
                os.dup2(2, 1)
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
