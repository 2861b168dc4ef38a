"""SGLang servers behind their router, as one rollout engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from accel.comm.backend_strings import weight_update_backend
from accel.contract import Accelerator
from rollout.deploy.config import ServerChannel, SGLangConfig
from rollout.deploy.hosts import LocalSpawner, Spawner
from rollout.deploy.layout import Layout
from rollout.deploy.ports import PortLease
from rollout.deploy.router import Router
from rollout.engines.errors import EngineError
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import (
    MEMORY_TAGS,
    MEMORY_TIMEOUT,
    EngineCapabilities,
    EngineHealth,
    GenerateRequest,
    GenerateResult,
)
from rollout.engines.sglang.adopting import check_adopted
from rollout.engines.sglang.command import ServerSettings
from rollout.engines.sglang.generating import Generating
from rollout.engines.sglang.group_channel import open_group_channel
from rollout.engines.sglang.http import HttpClient
from rollout.engines.sglang.planned import ServerMaker
from rollout.engines.sglang.recovery import Recovery
from rollout.engines.sglang.server import SGLangServer, all_of, first_failure
from rollout.engines.sglang.weights import DiskChannel, ExpectedWeights, TensorChannel, WeightChannel
from rollout.engines.torch_engine.detokenize import Detokenizer
from samples.errors import InputError


class SGLangEngine:
    """The servers of ``layout``'s one model, on this machine, and their router.

    Greedy responses depend on prompt and weights alone. Sampled ones depend on the request's seed alone only where the
    servers run with ``--sglang-overrides enable_deterministic_inference=true``, which SGLang has for some attention
    backends; else on the order in which requests are served.
    """

    def __init__(
        self,
        layout: Layout,
        settings: ServerSettings,
        config: SGLangConfig,
        accelerator: Accelerator,
        *,
        python: Path,
        log_dir: Path,
        weight_channel: ServerChannel = "disk",
        spawner: Spawner | None = None,
    ) -> None:
        """``spawner``: where the servers run; None: on this machine."""
        self._layout, self._settings, self._config, self._accelerator = layout, settings, config, accelerator
        self._python, self._log_dir = python, log_dir
        (self._model,) = layout.models
        for plan in self._model.engines:
            if len(plan.shares) > 1:
                raise InputError(f"engine {plan.name} spans nodes; this version starts servers on one machine only")
            if spawner is None and plan.shares[0].node > 0:
                raise InputError(
                    f"engine {plan.name} lies on node {plan.shares[0].node}, and all servers are started on this "
                    "machine: give --launcher ray and --rollout-num-gpus, or describe devices of one node"
                )
        self._ports = PortLease()
        self._spawner = spawner or LocalSpawner(self._ports)
        self._client = HttpClient(connections=settings.max_running_requests * max(1, len(self._model.engines)))
        self._servers: list[SGLangServer] = []  # those that generate
        self._encoders: list[SGLangServer] = []
        self._router: Router | None = None
        self._recovery: Recovery | None = None
        self._channel: WeightChannel | None = None  # distributed: opened once the trainer is there
        written = log_dir / f"weights-{self._model.name}"
        if weight_channel == "disk":
            self._channel = DiskChannel(written, settings.model_dir, flush=self._flushes)
        elif weight_channel == "tensor":
            self._channel = TensorChannel(flush=self._flushes)
        self._expected: ExpectedWeights | None = None
        self._generating: Generating | None = None  # what is under way at the servers
        self._version = -1
        self._update_failure = ""
        self._released: set[str] = set()  # of the memory tags

    @property
    def capabilities(self) -> EngineCapabilities:
        frees = self._accelerator.capabilities.memory_saver and self._settings.memory_saver
        return EngineCapabilities(
            returns_kept_token_ids=not self._model.disaggregated,  # they come from a server that is asked directly
            frees_memory=frees,
            keeps_requests_across_updates=True,
            keeps_cache_across_updates=True,
        )

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def description(self) -> str:
        """Who serves, known after ``start``."""
        versions = ", ".join(sorted({server.version for server in self._servers})) or "not started"
        return f"{len(self._servers)} SGLang server(s) ({versions}) behind {self._router.url if self._router else '-'}"

    @property
    def servers(self) -> list[SGLangServer]:
        return list(self._servers)

    @property
    def model_routers(self) -> dict[str, tuple[str, int]]:
        """(host, port) of the router by its model's name, for functions of the user's that ask servers themselves."""
        parts = urlsplit(self.router.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return {self._model.name: (parts.hostname, parts.port)}

    @property
    def router(self) -> Router:
        if self._router is None:
            raise EngineError("the engine is not running: call start() first")
        return self._router

    async def start(self) -> None:
        """All servers at once, and the router; EngineError names the first that fails, and nothing goes on then."""
        if self._router is not None:
            raise EngineError("the engine is started already")
        from samples.tokenizer import load_tokenizer

        trust = self._settings.trust_remote_code
        detokenizer = Detokenizer(load_tokenizer(self._settings.model_dir, trust_remote_code=trust))
        self._expected = ExpectedWeights(self._settings.model_dir)
        self._router = Router(
            self._model.name,
            self._config,
            self._client,
            self._ports,
            python=self._python,
            log_dir=self._log_dir,
            disaggregated=self._model.disaggregated,
        )
        try:
            await self._start_servers(self._router)
            for server in self._servers:
                if not server.ours:
                    await check_adopted(server, self._settings, self._model.num_gpus_per_engine)
                assert server.worker is not None
                await self._router.register(server.worker)
            self._recovery = Recovery(
                [*self._encoders, *self._servers],
                self._router,
                self._restore,
                interval=self._config.rollout_health_check_interval,
                timeout=self._config.rollout_health_check_timeout,
                max_restarts=self._config.max_engine_restarts,
                start_timeout=self._config.sglang_start_timeout,
            )
            self._generating = Generating(
                self._settings,
                self._config,
                self._client,
                self._router,
                self._servers,
                self._recovery,
                detokenizer,
            )
            self._recovery.start()
        except BaseException:
            await self.stop()
            raise

    async def _start_servers(self, router: Router) -> None:
        """All at once, but for encoders, which the others ask from their start on."""
        maker = ServerMaker(
            model=self._model,
            settings=self._settings,
            config=self._config,
            accelerator=self._accelerator,
            python=self._python,
            log_dir=self._log_dir,
            client=self._client,
            spawner=self._spawner,
        )
        waves = await maker.waves()
        made = [server for wave in waves for server in wave]
        self._servers = [server for server in made if server.worker is not None]
        self._encoders = [server for server in made if server.worker is None]
        others = [server.url for server in self._servers if not server.ours]
        first: list[Coroutine[Any, Any, None]] = [router.start(known=others)]
        for wave in waves:
            for server in wave:
                server.launch()
            timeout = self._config.sglang_start_timeout
            await first_failure(*first, *(server.wait_ready(timeout) for server in wave))
            first = []

    async def stop(self) -> None:
        router, servers = self._router, [*self._servers, *self._encoders]
        if router is None:
            return
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            await recovery.stop()
        self._router, self._servers, self._encoders, self._generating = None, [], [], None
        try:
            await all_of(router.stop(), *(server.stop() for server in servers))
        finally:
            if self._channel is not None:
                self._channel.close()
            self._ports.close()
            await self._client.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._requests().generate(request)

    async def _restore(self, server: SGLangServer) -> None:
        """Give a server that was started again what the others have."""
        if self._version < 0 or not self._model.updates_weights:
            return
        if await self._open_channel().reload(server):
            await self._check_version(server, self._version)
        elif not self._running().holds(
            "update"
        ):  # else everything comes next; the router lists no server that is paused
            raise EngineError(f"{server.name} is back, and the weights of version {self._version} were not kept")

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; return when they are answered. EngineError when they are not in time."""
        await self._requests().abort(request_id)

    async def pause(self) -> None:
        await self._running().hold("pause")
        await all_of(*(server.pause("in_place") for server in self._servers))

    async def resume(self) -> None:
        await all_of(*(server.resume() for server in self._servers))
        self._running().let_go("pause")

    async def join_trainer(self, address: str, word: str) -> None:
        channel = await open_group_channel(address, word, weight_update_backend(self._accelerator))
        if self._channel is not None:
            self._channel.close()
        self._channel = channel

    async def begin_update(self, version: int) -> None:  # noqa: ARG002 - the servers get it with the last tensor
        assert self._expected is not None
        recovery = self._running()
        await recovery.hold("update")
        await recovery.check(ask=bool(self._update_failure))  # a server may be why the update before this one failed
        await all_of(*(server.pause(self._settings.pause_mode) for server in self._updated()))
        self._expected.begin()
        self._update_failure = ""
        await self._open_channel().begin(self._updated())

    async def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._expected is not None
        self._expected.check(tensors)
        await self._open_channel().send(tensors)

    async def commit_update(self, version: int) -> None:
        assert self._expected is not None
        self._expected.check_whole()
        await self._open_channel().finish(str(version))
        await all_of(*(self._check_version(server, version) for server in self._updated()))
        if self._flushes:
            await all_of(*(server.flush() for server in self._updated()))
        self._version = version
        await all_of(*(server.resume() for server in self._updated()))
        self._running().let_go("update")

    async def held_version(self) -> int | None:
        return None  # servers take whole updates

    async def keep_weights(self, names: frozenset[str]) -> None:
        raise EngineError(f"SGLang servers take whole updates; {len(names)} weights were not sent")

    async def fail_update(self, reason: str) -> None:
        """Servers have been paused and requests held back since ``begin_update``; they stay so."""
        self._update_failure = reason

    async def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:  # noqa: ARG002
        raise EngineError("SGLang servers do not give their weights back, so they cannot be compared")

    async def flush_cache(self) -> None:
        await all_of(*(server.flush() for server in self._servers))

    async def release_memory(self, tags: tuple[str, ...] = (), timeout: float = MEMORY_TIMEOUT) -> None:
        self._check_frees()
        await self._running().hold("memory")
        self._released |= set(tags or MEMORY_TAGS)
        await all_of(*(server.release_memory(tags, timeout) for server in self._servers))

    async def resume_memory(self, tags: tuple[str, ...] = ()) -> None:
        self._check_frees()
        await all_of(*(server.resume_memory(tags) for server in self._servers))
        self._released -= set(tags or MEMORY_TAGS)
        if not self._released:
            self._running().let_go("memory")

    async def health(self) -> EngineHealth:
        every = [*self._servers, *self._encoders]
        alive = await asyncio.gather(*(self._is_alive(server) for server in every))
        dead = [server.name for server, well in zip(every, alive, strict=True) if not well]
        detail = "not running" if not alive else f"no answer from {', '.join(dead)}" if dead else self._update_failure
        under_way = self._generating
        later = under_way.later_tokens if under_way is not None else 0
        return EngineHealth(
            alive=bool(alive) and not dead,
            running=len(under_way.in_flight) if under_way is not None else 0,
            waiting=0,
            weight_version=self._version,
            detail=detail,
            extra={"generated_tokens": under_way.generated if under_way is not None else 0},
            counts={
                "restarts": self._recovery.restarts if self._recovery is not None else 0,
                "router_restarts": self._router.restarts if self._router is not None else 0,
                "http_retries": self._client.retried,
                **({} if self._flushes else {"old_cache_tokens": later}),
            },
        )

    @property
    def _flushes(self) -> bool:
        """Whether new weights empty the caches; else servers have none that outlives a request."""
        return self._settings.pause_mode is not PauseMode.IN_PLACE

    def _requests(self) -> Generating:
        if self._generating is None:
            raise EngineError("the engine is not running: call start() first")
        return self._generating

    def _running(self) -> Recovery:
        if self._recovery is None:
            raise EngineError("the engine is not running: call start() first")
        return self._recovery

    def _open_channel(self) -> WeightChannel:
        if self._channel is None:
            raise EngineError("the weight channel to the trainer is not open: call join_trainer() first")
        return self._channel

    def _updated(self) -> list[SGLangServer]:
        return self._servers if self._model.updates_weights else []

    async def _check_version(self, server: SGLangServer, version: int) -> None:
        found = await server.weight_version()
        if found != str(version):
            raise EngineError(f"{server.name} has weight version {found} after the update to {version}")

    async def _is_alive(self, server: SGLangServer) -> bool:
        return server.alive and await server.is_healthy()

    def _check_frees(self) -> None:
        if not self.capabilities.frees_memory:
            raise EngineError(
                f"SGLang servers on {self._accelerator.name} that were not started with the memory saver cannot give "
                "memory back while they run"
            )
