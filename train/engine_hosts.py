"""Hosts of rollout engines on a Ray cluster: an actor for each engine, on the node and the devices that Ray gave it.

The actor starts the engine's processes as its own children, so they see the devices that Ray assigned to it and end
with it, and it chooses their ports on the machine where they are bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.deploy.hosts import LOOPBACK, Host, Program
from rollout.deploy.layout import EnginePlan
from rollout.deploy.ports import PortLease
from rollout.deploy.process import ServerProcess, wait_until_ready
from rollout.engines.errors import EngineError

_POLL = 0.2  # seconds between two looks at a process, on its own machine
_WORDS_TIMEOUT = 15.0


class EngineHostActor:
    """All methods are coroutines of one loop. ``loopback``: the whole cluster is this machine, and nobody else's."""

    def __init__(self, loopback: bool) -> None:
        self._ports = PortLease()
        self._processes: dict[str, ServerProcess] = {}
        self._loopback = loopback

    async def address(self) -> str:
        """Where its servers are to listen."""
        if self._loopback:
            return LOOPBACK
        import ray.util

        return str(ray.util.get_node_ip_address())

    async def take_port(self, address: str) -> int:
        return self._ports.take(address)

    async def run(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start a process; returns when it has ended."""
        process = ServerProcess(name, command, log, environment)
        self._processes[name] = process
        process.start()
        while process.alive:
            await asyncio.sleep(_POLL)

    async def stop(self, name: str) -> None:
        if name in self._processes:
            await self._processes[name].stop()

    async def ending(self, name: str) -> tuple[int | None, str]:
        """Exit status and the end of the log, of a process that was started."""
        process = self._processes[name]
        return process.status, process.last_words()

    async def close(self) -> None:
        """End everything."""
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        self._ports.close()


class RayProgram:
    """One process on another host, as ``ServerProcess`` is one of this machine."""

    def __init__(
        self, actor: Any, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._actor, self._start = actor, (name, list(command), log, dict(environment))
        self._ended: Any = None  # a reference that is there once the process has ended, or its host

    @property
    def alive(self) -> bool:
        import ray

        return self._ended is not None and not ray.wait([self._ended], timeout=0)[0]

    @property
    def status(self) -> int | None:
        return self._ending()[0]

    def start(self) -> None:
        self._ended = self._actor.run.remote(*self._start)

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]], timeout: float, flag: str) -> None:
        await wait_until_ready(self, is_ready, timeout, flag)

    async def stop(self) -> None:
        import ray.exceptions

        if self._ended is None:
            return
        try:
            await self._actor.stop.remote(self.name)
        except ray.exceptions.RayActorError:  # its host has ended, and the process with it
            return
        finally:
            self._ended = None

    def last_words(self) -> str:
        return self._ending()[1]

    def _ending(self) -> tuple[int | None, str]:
        import ray

        try:
            if self._ended is not None and ray.wait([self._ended], timeout=0)[0]:
                ray.get(self._ended)  # raises where it could not even be started
            ended: tuple[int | None, str] = ray.get(self._actor.ending.remote(self.name), timeout=_WORDS_TIMEOUT)
        except EngineError as error:  # the host's own words; Ray raises them as what they are
            return None, f": {str(error).splitlines()[-1]}"
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            return None, f". Its host does not answer ({type(error).__name__}); its log there is {self._start[2]}"
        return ended


class RayHost:
    def __init__(self, actor: Any, address: str) -> None:
        self._actor, self.address = actor, address
        self.first_device: int | None = 0  # the actor's devices are all that its children see

    async def take_port(self) -> int:
        port: int = await self._actor.take_port.remote(self.address)
        return port

    def program(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Program:
        return RayProgram(self._actor, name, command, log, environment)


class RaySpawner:
    """``actors``: an ``EngineHostActor`` for each engine, by the engine's name in the layout."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = dict(actors)
        self._hosts: dict[str, RayHost] = {}

    async def host_of(self, plan: EnginePlan) -> Host:
        if plan.name not in self._actors:
            raise EngineError(f"engine {plan.name}: devices were reserved for {', '.join(self._actors)} alone")
        if plan.name not in self._hosts:
            actor = self._actors[plan.name]
            self._hosts[plan.name] = RayHost(actor, await actor.address.remote())
        return self._hosts[plan.name]
