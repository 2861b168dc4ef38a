"""What the environment says about the emulation. Importing this loads nothing of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from accel.errors import AcceleratorError

EMULATE_ENV = "ACCELRL_EMULATE_MUSA"  # emulate wherever musa is chosen, as --emulate does
ASYNC_ENV = "ACCELRL_EMULATE_ASYNC"  # copies complete late, and neither IPC nor peer access exists
DEVICES_ENV = "ACCELRL_EMULATED_DEVICES"
MEMORY_ENV = "ACCELRL_EMULATED_MEMORY"
VISIBLE_ENV = "MUSA_VISIBLE_DEVICES"

DEFAULT_DEVICES = 2
MOST_DEVICES = 16
DEFAULT_MEMORY = 80 << 30


@dataclass(frozen=True)
class EmulationSettings:
    """``devices``: physical ids that this process sees, in its order; ``memory``: bytes of each."""

    devices: tuple[int, ...]
    memory: int
    asynchronous: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EmulationSettings:
        """AcceleratorError names the variable that cannot be read."""
        installed = _number(environ, DEVICES_ENV, DEFAULT_DEVICES, MOST_DEVICES)
        return cls(
            devices=visible_devices(environ.get(VISIBLE_ENV), installed),
            memory=_number(environ, MEMORY_ENV, DEFAULT_MEMORY, 1 << 50),
            asynchronous=switched_on(environ, ASYNC_ENV),
        )


def emulation_asked(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for the emulation."""
    return switched_on(environ, EMULATE_ENV)


def switched_on(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise AcceleratorError(f"{variable}={value!r}: set it to 1 to turn it on, to 0 or nothing for off")
    return value == "1"


def visible_devices(value: str | None, installed: int) -> tuple[int, ...]:
    """Physical ids behind the visible-devices list as a driver reads it: up to the first that does not exist."""
    if value is None:
        return tuple(range(installed))
    seen: list[int] = []
    for token in value.split(","):
        word = token.strip()
        if not word.isdecimal() or int(word) >= installed or int(word) in seen:
            break
        seen.append(int(word))
    return tuple(seen)


def _number(environ: Mapping[str, str], variable: str, default: int, most: int) -> int:
    value = environ.get(variable, "").strip()
    if not value:
        return default
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise AcceleratorError(f"{variable}={value!r}: give a whole number from 1 to {most}")
    return int(value)
