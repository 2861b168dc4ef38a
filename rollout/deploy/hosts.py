"""Where engines' processes run: on this machine, or wherever whoever starts the run has reserved devices for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollout.deploy.layout import EnginePlan
from rollout.deploy.ports import PortLease
from rollout.deploy.process import ServerProcess

LOOPBACK = "127.0.0.1"


class Program(Protocol):
    """A server's process, as ``ServerProcess`` is one of this machine."""

    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]], timeout: float, flag: str) -> None: ...

    async def stop(self) -> None: ...

    def last_words(self) -> str: ...


class Host(Protocol):
    """A machine, or the part of one that is reserved for an engine.

    ``address``: where its servers listen, and others find them. ``first_device``: of those that its processes see, the
    index of the engine's first one; None: the plan's.
    """

    address: str
    first_device: int | None

    async def take_port(self) -> int:
        """A port of that machine that nobody else is given while the host lasts."""
        ...

    def program(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Program: ...


class Spawner(Protocol):
    """Tells the host of each engine. ``close`` ends what is left running there."""

    async def host_of(self, plan: EnginePlan) -> Host: ...


class LocalHost:
    """This machine; all engines share it, and its ports are held as ``ports`` says."""

    def __init__(self, ports: PortLease) -> None:
        self.address = LOOPBACK
        self.first_device: int | None = None
        self._ports = ports

    async def take_port(self) -> int:
        return self._ports.take(self.address)

    def program(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Program:
        return ServerProcess(name, command, log, environment)


class LocalSpawner:
    def __init__(self, ports: PortLease) -> None:
        self._host = LocalHost(ports)

    async def host_of(self, plan: EnginePlan) -> Host:  # noqa: ARG002 - all lie here
        return self._host
