"""The router in front of the servers of one model: started or adopted, told its workers, restarted when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.deploy.addresses import base_url
from rollout.deploy.config import SGLangConfig
from rollout.deploy.ports import PortLease, is_free
from rollout.deploy.process import ServerProcess
from rollout.engines.errors import EngineError
from rollout.engines.sglang.http import HttpClient, Refusal, field_of
from samples.errors import InputError

_READY_TIMEOUT = 60.0  # seconds; it starts in one or two
_REGISTER_TIMEOUT = 60.0  # seconds until a worker that was made known is in the list
_POLL = 0.1
_LATER = 60  # seconds that the router waits longer for a response than we do, who say so and do not ask again
AFFINITY_HEADER = "X-SMG-Routing-Key"  # read by --router-policy manual


@dataclass(frozen=True)
class Worker:
    """``worker_type``: regular, prefill or decode; ``bootstrap_port`` is a prefill server's."""

    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None

    @property
    def registration(self) -> dict[str, Any]:
        body: dict[str, Any] = {"url": self.url, "worker_type": self.worker_type}
        return body if self.bootstrap_port is None else body | {"bootstrap_port": self.bootstrap_port}


def router_command(
    python: Path,
    config: SGLangConfig,
    *,
    host: str,
    port: int,
    prometheus_port: int,
    log_dir: Path,
    disaggregated: bool = False,
) -> list[str]:
    """The command line of a router without workers. Requests are logged at its level "info" and below."""
    level = "info" if config.router_log_requests and config.router_log_level not in ("debug", "info") else None
    command = [str(python), "-m", "sglang_router.launch_router"]
    command += ["--host", host, "--port", str(port)]
    command += ["--policy", config.router_policy]
    command += ["--log-level", level or config.router_log_level, "--log-dir", str(log_dir)]
    command += ["--prometheus-host", host, "--prometheus-port", str(prometheus_port)]
    command += ["--request-timeout-secs", str(int(config.sglang_request_timeout) + _LATER)]
    # Retries and health are ours: a request that the router sent twice would be answered twice, and a server that is
    # paused for new weights is not dead.
    command += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"]
    return [*command, "--pd-disaggregation"] if disaggregated else command


class Router:
    """One model's router. ``adopted``: it was given by address, and is left running at the end."""

    def __init__(
        self,
        model: str,
        config: SGLangConfig,
        client: HttpClient,
        ports: PortLease,
        *,
        python: Path,
        log_dir: Path,
        host: str = "127.0.0.1",
        disaggregated: bool = False,
    ) -> None:
        self._model, self._config, self._client, self._ports = model, config, client, ports
        self._python, self._log_dir, self._host, self._disaggregated = python, log_dir, host, disaggregated
        self._workers: dict[str, Worker] = {}
        self._added: set[str] = set()  # addresses that were not there before
        self._process: ServerProcess | None = None
        self.url = ""
        self.adopted = config.sglang_router_ip is not None
        self.restarts = 0

    @property
    def alive(self) -> bool:
        """Whether its process runs; of one that was adopted nothing is known without asking."""
        return self._process is None or self._process.alive

    async def start(self, known: Collection[str] = ()) -> None:
        """Return once it answers. EngineError with the end of its log, or with the address that does not answer.

        ``known``: addresses of servers that one which was given by address may have already. Others would answer
        requests of ours with weights of their own, so they are an error.
        """
        config = self._config
        if config.sglang_router_ip is not None:
            assert config.sglang_router_port is not None
            self.url = base_url(config.sglang_router_ip, config.sglang_router_port)
            if not await self._client.answers(f"{self.url}/health"):
                raise EngineError(
                    f"--sglang-router-ip {config.sglang_router_ip} --sglang-router-port {config.sglang_router_port}: "
                    f"{self.url}/health does not answer; start the router, or leave both out to have one started"
                )
            if strangers := [one["url"] for one in await self._listed() if one["url"] not in known]:
                raise EngineError(
                    f"--sglang-router-ip {config.sglang_router_ip} --sglang-router-port {config.sglang_router_port}: "
                    f"it sends requests to {', '.join(strangers)} too, which this run does not know; take them out of "
                    "it, or give a router without servers"
                )
            return
        for flag, given in (
            ("--sglang-router-port", config.sglang_router_port),
            ("--router-prometheus-port", config.router_prometheus_port),
        ):
            if given is not None and not is_free(self._host, given):
                raise InputError(f"{flag} {given}: it is taken on {self._host}; give another, or leave it out")
        port = config.sglang_router_port or self._ports.take(self._host)
        self.url = base_url(self._host, port)
        prometheus = config.router_prometheus_port or self._ports.take(self._host)
        command = router_command(
            self._python,
            config,
            host=self._host,
            port=port,
            prometheus_port=prometheus,
            log_dir=self._log_dir / f"router-{self._model}",
            disaggregated=self._disaggregated,
        )
        self._process = ServerProcess(f"router of {self._model}", command, self._log_dir / f"router-{self._model}.log")
        await self._launch()

    async def _launch(self) -> None:
        assert self._process is not None
        self._process.start()
        await self._process.wait_ready(self._is_live, _READY_TIMEOUT, "a router's bound")

    async def _is_live(self) -> bool:
        return await self._client.answers(f"{self.url}/liveness")

    async def register(self, worker: Worker) -> None:
        """Make a worker known; return once the router lists it as healthy. Known ones stay as they are."""
        self._workers[worker.url] = worker
        if worker.url in {one["url"] for one in await self._listed()}:
            return
        self._added.add(worker.url)
        await self._client.post(f"{self.url}/workers", worker.registration)
        await self._until_listed(worker.url, there=True)

    async def deregister(self, url: str) -> None:
        """No request goes there from now on. An unknown one is no error."""
        self._workers.pop(url, None)
        for one in await self._listed():
            if one["url"] == url:
                try:
                    await self._client.delete(f"{self.url}/workers/{one['id']}")
                except Refusal as refusal:
                    if refusal.status != 404:
                        raise
        await self._until_listed(url, there=False)

    def forget(self, url: str) -> None:
        """Not to be registered where the router is started again: the server has died."""
        self._workers.pop(url, None)

    async def workers(self) -> list[str]:
        """Addresses of those that it sends requests to."""
        return [one["url"] for one in await self._listed() if one.get("is_healthy", True)]

    async def ensure(self) -> bool:
        """Restart it, with its workers, where it has died; True when it had. One that was adopted is left alone."""
        if self._process is None or self._process.alive:
            return False
        self.restarts += 1
        await self._process.stop()
        await self._launch()
        workers: Sequence[Worker] = list(self._workers.values())
        for worker in workers:
            await self.register(worker)
        return True

    async def stop(self) -> None:
        """End it, or, one that was adopted, take out of it what we told it."""
        if self.adopted:
            for url in self._added & set(self._workers):
                await self.deregister(url)
        elif self._process is not None:
            await self._process.stop()

    def last_words(self) -> str:
        return self._process.last_words() if self._process is not None else ""

    async def _listed(self) -> list[dict[str, Any]]:
        """Each with its "url" and "id"."""
        where = f"{self.url}/workers"
        listed = field_of(await self._client.get(where), "workers", where)
        if not isinstance(listed, list):
            raise EngineError(f"{where} answered with {type(listed).__name__} for a list; is it SGLang's router?")
        for one in listed:
            for name in ("url", "id"):
                field_of(one, name, where)
        return listed

    async def _until_listed(self, url: str, *, there: bool) -> None:
        for _ in range(int(_REGISTER_TIMEOUT / _POLL)):
            if (url in await self.workers()) == there:
                return
            await asyncio.sleep(_POLL)
        what = "list" if there else "drop"
        raise EngineError(
            f"{self.url} did not {what} the server {url} within {_REGISTER_TIMEOUT:g} s{self.last_words()}"
        )
