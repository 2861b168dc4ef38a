"""What brings dead servers back, with servers that die when a test says so."""

from __future__ import annotations

import asyncio

import pytest

from rollout.deploy.router import Worker
from rollout.engines.errors import EngineError
from rollout.engines.sglang import recovery as module
from rollout.engines.sglang.recovery import Recovery


class StandInServer:
    ours = True

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.url, self.worker = name, f"http://{name}", Worker(f"http://{name}")
        self.worker = Worker(self.url)
        self.alive, self.answers, self.asked = True, True, 0
        self.paused = False
        self._calls = calls

    async def is_healthy(self, timeout: float) -> bool:
        self.asked += 1
        return self.answers and not self.paused

    async def is_up(self, timeout: float) -> bool:
        return self.answers

    async def stop(self) -> None:
        self._calls.append(f"stop {self.name}")

    def launch(self) -> None:
        self._calls.append(f"launch {self.name}")
        self.alive = self.answers = True

    async def wait_ready(self, timeout: float) -> None: ...


class StandInRouter:
    def __init__(self, calls: list[str]) -> None:
        self.alive = True
        self.restarts = 0
        self.forgotten: set[str] = set()
        self._calls = calls

    async def ensure(self) -> bool:
        died, self.alive = not self.alive, True
        self.restarts += died
        return died

    def forget(self, url: str) -> None:
        self.forgotten.add(url)

    async def register(self, worker: Worker) -> None:
        self._calls.append(f"register {worker.url}")

    async def deregister(self, url: str) -> None:
        self._calls.append(f"deregister {url}")


class Case:
    def __init__(self, *, max_restarts: int = 3) -> None:
        self.calls: list[str] = []
        self.servers = [StandInServer("a", self.calls), StandInServer("b", self.calls)]
        self.router = StandInRouter(self.calls)
        self.recovery = Recovery(
            self.servers,
            self.router,
            self._restore,
            interval=0.01,
            timeout=1.0,
            max_restarts=max_restarts,
            start_timeout=1.0,
        )

    async def _restore(self, server: StandInServer) -> None:
        self.calls.append(f"restore {server.name}")

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.005)


@pytest.fixture
async def case():
    case = Case()
    case.recovery.start()
    yield case
    await case.recovery.stop()


BACK = ["deregister http://a", "stop a", "launch a", "restore a", "register http://a"]


async def test_a_dead_server_gets_the_weights_before_it_gets_requests(case):
    case.servers[0].alive = False
    await case.until(lambda: len(case.calls) == len(BACK))
    assert case.calls == BACK
    assert case.recovery.restarts == 1
    assert not case.recovery.down


async def test_one_that_runs_and_does_not_answer_counts_as_dead_after_three_checks(case):
    case.servers[0].answers = False
    await case.until(lambda: len(case.calls) == len(BACK))
    assert case.calls == BACK
    assert case.servers[0].asked >= 3


@pytest.mark.parametrize("reasons", [("update",), ("memory",), ("pause", "update")])
async def test_nothing_is_asked_or_started_again_while_weights_move_or_memory_is_released(case, reasons):
    for reason in reasons:
        await case.recovery.hold(reason)
    await case.recovery.hold(reasons[0])  # the same one twice counts once
    asked = [server.asked for server in case.servers]
    case.servers[0].alive = case.router.alive = False
    await asyncio.sleep(0.1)
    assert case.calls == []
    for reason in reasons[1:]:
        case.recovery.let_go(reason)
        await asyncio.sleep(0.05)
        assert case.calls == []
    assert [server.asked for server in case.servers] == asked
    case.recovery.let_go(reasons[0])
    await case.until(lambda: len(case.calls) == len(BACK))
    assert case.router.alive


async def test_the_others_go_on_answering_while_one_is_brought_back_and_all_wait_where_none_is_left(case, monkeypatch):
    ready = asyncio.Event()

    async def slow(timeout: float) -> None:
        await ready.wait()

    for server in case.servers:
        monkeypatch.setattr(server, "wait_ready", slow)
    case.servers[0].alive = False
    await case.until(lambda: "launch a" in case.calls)
    await asyncio.wait_for(case.recovery.whole(), 5)
    assert case.recovery.down == {"http://a"}
    case.servers[1].alive = False
    ready.set()
    await case.until(lambda: case.calls.count("register http://b") == 1)
    await asyncio.wait_for(case.recovery.whole(), 5)


async def test_after_the_last_restart_everybody_who_waits_is_told_what_happened(monkeypatch):
    case = Case(max_restarts=1)
    case.recovery.start()
    try:
        case.servers[0].alive = False
        await case.until(lambda: len(case.calls) == len(BACK))
        case.router.alive = False
        await case.until(lambda: case.router.alive)
        case.servers[1].alive = False
        await case.until(lambda: case.recovery.failure is not None)
        with pytest.raises(
            EngineError,
            match=r"b died, and --max-engine-restarts 1 are used up. What happened before: \S+ a died; \S+ a is back; "
            r"\S+ the router died and was started again; \S+ b died",
        ):
            await case.recovery.whole()
        assert "launch b" not in case.calls
    finally:
        await case.recovery.stop()


async def test_after_an_update_that_failed_one_that_does_not_answer_at_once_is_brought_back(case):
    await case.recovery.hold("update")
    case.servers[0].answers = False  # dead, and its supervisor is not done with it
    case.servers[1].paused = True  # as the update has left it
    await case.recovery.check()
    assert case.calls == []
    await case.recovery.check(ask=True)
    assert case.calls == BACK
    case.recovery.let_go("update")


async def test_a_server_of_somebody_else_is_not_started_again(case):
    case.servers[1].ours = False
    case.servers[1].alive = False
    await case.until(lambda: case.recovery.failure is not None)
    with pytest.raises(EngineError, match=r"b \(http://b\) died, and was started by somebody else"):
        await case.recovery.whole()
    assert case.calls == []


async def test_a_router_that_dies_again_and_again_ends_the_run_with_the_history(monkeypatch):
    case = Case(max_restarts=2)
    case.recovery.start()
    try:
        for _ in range(2):
            case.router.alive = False
            await case.until(lambda: case.router.alive)
        case.router.alive = False
        await case.until(lambda: case.recovery.failure is not None)
        with pytest.raises(EngineError, match=r"the router died, and --max-engine-restarts 2 are used up"):
            await case.recovery.whole()
        assert case.router.restarts == 2
    finally:
        await case.recovery.stop()


async def test_a_server_that_cannot_even_be_launched_is_told_to_everybody_who_waits(case, monkeypatch):
    def launch():
        raise OSError(28, "No space left on device", "/run/servers/a.log")

    monkeypatch.setattr(case.servers[0], "launch", launch)
    case.servers[0].alive = False
    await case.until(lambda: case.recovery.failure is not None)
    with pytest.raises(EngineError, match=r"No space left on device.*a\.log.* What happened before: \S+ a died"):
        await case.recovery.whole()


async def test_letting_go_of_what_nobody_held_leaves_the_watch_alone(case, monkeypatch):
    ready = asyncio.Event()

    async def slow(timeout: float) -> None:
        await ready.wait()

    monkeypatch.setattr(case.servers[0], "wait_ready", slow)
    case.servers[0].alive = False
    await case.until(lambda: "launch a" in case.calls)
    case.recovery.let_go("pause")
    assert case.recovery.lock.locked()
    ready.set()
    await case.until(lambda: "register http://a" in case.calls)
    case.servers[1].alive = False
    await case.until(lambda: "register http://b" in case.calls)  # it watches still


async def test_a_restart_that_fails_is_tried_again_until_restarts_are_used_up(case, monkeypatch):
    tries = []

    async def fails_once(timeout: float) -> None:
        tries.append(timeout)
        if len(tries) == 1:
            raise EngineError("a ended with status 1 before it was ready")

    monkeypatch.setattr(case.servers[0], "wait_ready", fails_once)
    case.servers[0].alive = False
    await case.until(lambda: "register http://a" in case.calls)
    assert case.recovery.restarts == 2
    assert case.recovery.failure is None

    async def fails(timeout: float) -> None:
        raise EngineError("b ended with status 1 before it was ready")

    monkeypatch.setattr(case.servers[1], "wait_ready", fails)
    case.servers[1].alive = False
    await case.until(lambda: case.recovery.failure is not None)
    told = r"b did not come back \(b ended with status 1 before it was ready\), and --max-engine-restarts 3 are used up"
    with pytest.raises(EngineError, match=told):
        await case.recovery.whole()
    assert case.calls.count("launch b") == 1


async def test_a_router_that_dies_while_a_server_is_brought_back_is_brought_back_too(case, monkeypatch):
    async def slow(timeout: float) -> None:
        case.router.alive = False

    registered = case.router.register

    async def register(worker: Worker) -> None:
        if not case.router.alive:
            raise EngineError("no answer from the router")
        await registered(worker)

    monkeypatch.setattr(case.servers[0], "wait_ready", slow)
    monkeypatch.setattr(case.router, "register", register)
    case.servers[0].alive = False
    await case.until(lambda: "register http://a" in case.calls or case.recovery.failure is not None)
    assert case.recovery.failure is None
    assert case.router.restarts == case.recovery.restarts == 1


async def test_a_router_that_dies_with_a_server_is_not_told_of_the_dead_one(case, monkeypatch):
    """It would wait for it to answer, and be taken for one that does not take servers."""
    revived = case.router.ensure

    async def ensure() -> bool:
        dead = {server.url for server in case.servers if not server.alive} - case.router.forgotten
        if not case.router.alive and dead:
            raise EngineError(f"did not list {dead}")
        return await revived()

    monkeypatch.setattr(case.router, "ensure", ensure)
    async with case.recovery.lock:
        case.servers[0].alive = case.router.alive = False
    await case.until(lambda: "register http://a" in case.calls or case.recovery.failure is not None)
    assert case.recovery.failure is None


async def test_with_a_router_that_died_a_server_counts_as_dead_that_gives_no_answer_now(case, monkeypatch):
    """Its supervisor may still be at clearing away after it, and the router may die again over it."""
    revived, tries = case.router.ensure, []

    async def ensure() -> bool:
        tries.append(set(case.router.forgotten))
        if len(tries) == 1:
            case.router.restarts += 1
            raise EngineError("the router ended")
        return await revived()

    monkeypatch.setattr(case.router, "ensure", ensure)
    async with case.recovery.lock:
        case.servers[0].answers = case.router.alive = False
    await case.until(lambda: "register http://a" in case.calls or case.recovery.failure is not None)
    assert case.recovery.failure is None
    assert tries == [{"http://a"}, {"http://a"}]
