"""The lists in visible-devices variables ("4,5,6,7", "4-7", "GPU-5b1e…"), and variables that contradict each other."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from accel.contract import Accelerator
from accel.errors import AcceleratorError

UUID_LIKE = re.compile(r"[A-Za-z][\w:./-]*", re.ASCII)
_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)", re.ASCII)
MOST_DEVICES = 4096  # of one machine; a longer list is a slip, and must not fill the memory
_LONGEST_NUMBER = 9  # digits
_OTHERS_WORDS = ("all", "none", "void")  # of NVIDIA_VISIBLE_DEVICES, which container runtimes read and drivers do not
_NOTHING = ("-1", "nodevfiles")  # how launchers say "no device": the list ends there, as it does for the drivers


@dataclass(frozen=True)
class VisibleDevices:
    """A parsed list. ``ids`` are numbers or UUIDs as text, each once, in order; None when the variable is not set."""

    variable: str | None
    ids: tuple[str, ...] | None

    @classmethod
    def parse(cls, variable: str | None, value: str | None) -> VisibleDevices:
        """Read a variable's value: ids, ranges and UUIDs by commas; an empty value hides every device."""
        if value is None:
            return cls(variable, None)
        ids: dict[str, None] = {}
        for token in (part.strip() for part in value.split(",")):
            if token.lower() in _NOTHING:
                break
            for device in _expand(token, variable, value) if token else ():
                ids.setdefault(device)
        return cls(variable, tuple(ids))

    def local_index(self, device: str) -> int:
        """Local index of a physical id; of a local one where it is not also a physical one."""
        number = int(device) if device.isdecimal() else None
        if self.ids is None:
            if number is None:
                raise AcceleratorError(
                    f"the device {device!r} cannot be numbered because {self.variable or 'no variable'} is not set: "
                    "list it "
                    "there, or give its index"
                )
            return number
        if device in self.ids:
            return self.ids.index(device)
        if number is not None and number < len(self.ids):
            return number
        raise AcceleratorError(f"the device {device!r} is not among {self}: {self._valid()}")

    def physical_id(self, local: int) -> str:
        """What stands at a local index."""
        if self.ids is None:
            return str(local)
        if local < len(self.ids):
            return self.ids[local]
        raise AcceleratorError(f"there is no local device {local} under {self}: {self._valid()}")

    def __str__(self) -> str:
        return f"{self.variable}={','.join(self.ids)!r}" if self.ids is not None else f"{self.variable} (not set)"

    def _valid(self) -> str:
        if not self.ids:
            return "no device is visible"
        return f"valid are {', '.join(self.ids)}, or local indices 0 to {len(self.ids) - 1}"


def mask_problems(accelerator: Accelerator, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that contradict the backend's own, each in words with what to do. Empty ones of others say nothing."""
    own = accelerator.mask_variable(environ)
    value = environ.get(own, "").strip() if own else ""
    problems = []
    for other in accelerator.lower_masks if value else ():
        if environ.get(other, "").strip():
            problems.append(
                f"{own}={value} and {other}={environ[other]} are both set, one numbering on top of another: unset "
                f"{other}"
            )
    for other in accelerator.same_masks if own is not None and own in environ else ():
        there = environ.get(other, "").strip()
        if there and VisibleDevices.parse(other, there).ids != VisibleDevices.parse(own, value).ids:
            problems.append(f"{own}={value} and {other}={there} contradict each other: unset {other}")
    return problems


def _expand(token: str, variable: str | None, value: str) -> list[str]:
    span = _RANGE.fullmatch(token)
    if span and len(span[1]) <= _LONGEST_NUMBER >= len(span[2]):
        first, last = int(span[1]), int(span[2])
        if last - first >= MOST_DEVICES:
            raise AcceleratorError(
                f"{variable}={value!r}: {token!r} is {last - first + 1} devices; most are {MOST_DEVICES}"
            )
        if first <= last:
            return [str(number) for number in range(first, last + 1)]
    elif token.isascii() and token.isdecimal() and len(token) <= _LONGEST_NUMBER:
        return [str(int(token))]
    elif UUID_LIKE.fullmatch(token) and token.lower() not in _OTHERS_WORDS:
        return [token]
    raise AcceleratorError(
        f"{variable}={value!r}: {token!r} is no device id. List numbers, ranges (4-7) or UUIDs, by commas"
    )
