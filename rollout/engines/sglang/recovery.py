"""Watches the servers and the router, and brings back what has died: restarted, given the current weights, checked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from rollout.deploy.router import Router
from rollout.engines.errors import EngineError
from rollout.engines.sglang.server import SGLangServer

_LOOK_EVERY = 0.5  # seconds between two looks at the processes; an answer is asked for less often
_FAILURES = 3  # checks without an answer, one after the other, before a server that runs counts as dead


class Recovery:
    """Runs beside generation; ``hold`` and ``let_go`` stop it while weights move, memory is released or all is paused.

    ``interval`` and ``timeout``: seconds between two checks of each server, and that one may take. ``restore`` gives a
    server that was started again the current weights and checks them. After ``max_restarts`` restarts of all servers
    together, whether they succeed or not, or as many of the router, ``failure`` is set, with the history, and no more
    is tried.
    """

    def __init__(
        self,
        servers: Sequence[SGLangServer],
        router: Router,
        restore: Callable[[SGLangServer], Awaitable[None]],
        *,
        interval: float,
        timeout: float,
        max_restarts: int,
        start_timeout: float,
    ) -> None:
        self.lock = asyncio.Lock()
        self.failure: EngineError | None = None
        self.restarts = 0
        self._servers, self._router, self._restore = servers, router, restore
        self._interval, self._timeout = interval, timeout
        self._max_restarts, self._start_timeout = max_restarts, start_timeout
        self._history: list[str] = []
        self._unanswered = dict.fromkeys((server.name for server in servers), 0)
        self._task: asyncio.Task[None] | None = None
        self._held_for: set[str] = set()
        self.down: set[str] = set()  # addresses of servers that are being brought back
        self._whole = asyncio.Event()  # set while requests may go out
        self._whole.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="server recovery")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._whole.set()

    async def hold(self, reason: str) -> None:
        """Nothing is checked or restarted from now on, until every reason is let go. The same one twice counts once."""
        if not self._held_for:
            await self.lock.acquire()
        self._held_for.add(reason)

    def holds(self, reason: str) -> bool:
        return reason in self._held_for

    def let_go(self, reason: str) -> None:
        if reason not in self._held_for:
            return  # the lock may be somebody else's
        self._held_for.remove(reason)
        if not self._held_for:
            self.lock.release()

    async def whole(self) -> None:
        """Return once the router and a server are up. Raises ``failure`` when they will not be."""
        await self._whole.wait()
        if self.failure is not None:
            raise self.failure

    async def check(self, *, ask: bool = False) -> None:
        """Look now, and bring back what is dead; the caller holds ``lock``.

        With ``ask`` one that does not answer now is dead too: its supervisor may still be at clearing away after it.
        """
        if ask:
            await self._find_silent()
        try:
            if not self._router.alive or any(self._is_dead(server) for server in self._servers):
                self._whole.clear()
            await self._ensure_router()
            for server in [one for one in self._servers if self._is_dead(one)]:
                await self._bring_back(server)
        except EngineError as error:
            self._give_up(str(error))
        except Exception as error:  # such as no space for a log: said, with its cause, to everybody who waits
            self._give_up(f"{type(error).__name__}: {error}")
            assert self.failure is not None
            raise self.failure from error
        finally:
            self._whole.set()
        if self.failure is not None:
            raise self.failure

    async def _watch(self) -> None:
        asked = time.monotonic()
        while self.failure is None:
            await asyncio.sleep(_LOOK_EVERY)
            async with self.lock:
                if time.monotonic() - asked >= self._interval:
                    await asyncio.gather(*(self._ask(server) for server in self._servers))
                    asked = time.monotonic()
                with contextlib.suppress(EngineError):  # kept in ``failure``, and raised by whoever waits
                    await self.check()

    async def _ensure_router(self) -> None:
        while not self._router.alive:
            if self._router.restarts >= self._max_restarts:
                raise EngineError(f"the router died, and --max-engine-restarts {self._max_restarts} are used up")
            await self._find_silent()
            for server in self._servers:
                if self._is_dead(server):
                    self._router.forget(server.url)  # it would wait for it
            try:
                await self._router.ensure()
            except EngineError:
                if self._router.alive:
                    raise
                self._note("the router died, was started again, and died")
            else:
                self._note("the router died and was started again")

    async def _find_silent(self) -> None:
        """Whoever does not answer now counts as dead."""
        up = await asyncio.gather(*(server.is_up(self._timeout) for server in self._servers))
        gone = [server.name for server, answered in zip(self._servers, up, strict=True) if not answered]
        self._unanswered |= dict.fromkeys(gone, _FAILURES)

    def _is_dead(self, server: SGLangServer) -> bool:
        return not server.alive or self._unanswered[server.name] >= _FAILURES

    async def _ask(self, server: SGLangServer) -> None:
        answered = server.alive and await server.is_healthy(self._timeout)
        self._unanswered[server.name] = 0 if answered else self._unanswered[server.name] + 1

    async def _bring_back(self, server: SGLangServer) -> None:
        why = "gave no answer" if server.alive else "died"
        self._note(f"{server.name} {why}")
        if not server.ours:
            raise EngineError(f"{server.name} ({server.url}) {why}, and was started by somebody else")
        while True:
            if self.restarts >= self._max_restarts:
                raise EngineError(f"{server.name} {why}, and --max-engine-restarts {self._max_restarts} are used up")
            self.restarts += 1
            try:
                await self._start_again(server)
            except EngineError as error:
                why = f"did not come back ({error})"
                self._note(f"{server.name} did not come back")
            else:
                return

    async def _start_again(self, server: SGLangServer) -> None:
        self.down.add(server.url)
        await self._router.deregister(server.url)
        if any(other.alive and other.url not in self.down for other in self._servers):
            self._whole.set()  # the others go on answering meanwhile
        await server.stop()
        server.launch()
        await server.wait_ready(self._start_timeout)
        if server.worker is not None:
            await self._restore(server)
            await self._ensure_router()  # it may have died meanwhile
            await self._router.register(server.worker)
        self._unanswered[server.name] = 0
        self.down.discard(server.url)
        self._note(f"{server.name} is back")

    def _note(self, what: str) -> None:
        self._history.append(f"{time.strftime('%H:%M:%S')} {what}")

    def _give_up(self, why: str) -> None:
        self.failure = EngineError(f"{why}. What happened before: {'; '.join(self._history)}")
