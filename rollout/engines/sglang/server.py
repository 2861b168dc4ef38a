"""One SGLang server: started by us or by somebody else, and what is asked of it outside generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollout.deploy.hosts import Program
from rollout.deploy.router import Worker
from rollout.engines.errors import EngineError
from rollout.engines.sglang.http import HttpClient, field_of
from rollout.engines.sglang.memory_tags import server_tags
from samples.errors import InputError

NEEDED = (
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
)
_UPDATE_TIMEOUT = 600.0  # seconds that one bucket, or one load from disk, may take
_CONTROL_TIMEOUT = 60.0
_FORGET_TIMEOUT = 5.0


class SGLangServer:
    """``process`` is None for a server that somebody else started: it is used, and left running.

    ``update_session``: whether tensors are sent between begin_weight_update and end_weight_update, which servers from
    0.5.23 on demand and older ones do not know. ``worker``: what the router is told of it; None for an encoder of
    images, which answers no requests of ours and keeps its weights. ``launched_at`` and ``ready_at`` are of the
    last start, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        url: str,
        client: HttpClient,
        process: Program | None = None,
        *,
        worker: Worker | None,
    ) -> None:
        self.name, self.url, self.worker = name, url, worker
        self._client, self._process = client, process
        self.update_session = False
        self._in_session = False
        self.tensor_parallel_size = 1
        self.version = "unknown"
        self._paths: frozenset[str] = frozenset()
        self.launched_at = self.ready_at = 0.0

    @property
    def ours(self) -> bool:
        """Whether we started it, and so may start it again."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether its process runs; of somebody else's server nothing is known without asking."""
        return self._process is None or self._process.alive

    def launch(self) -> None:
        self._in_session = False
        self.launched_at = time.monotonic()
        if self._process is not None:
            self._process.start()

    async def wait_ready(self, timeout: float) -> None:
        """Return once it answers, and has what we need. EngineError with the end of its log."""
        if self._process is None:
            if not await self.is_healthy(timeout=30.0):
                raise InputError(f"{self.name}: {self.url}/health does not answer; start the server, or leave it out")
        else:
            await self._process.wait_ready(self.is_healthy, timeout, "--sglang-start-timeout")
        if self.worker is not None:
            await self._probe()
        self.ready_at = time.monotonic()

    async def _probe(self) -> None:
        """Ask it what it has: endpoints and version."""
        described = await self._client.get(f"{self.url}/openapi.json")
        paths = field_of(described, "paths", f"{self.url}/openapi.json")
        if not isinstance(paths, dict):
            raise EngineError(f"{self.url}/openapi.json describes no endpoints; is {self.name} an SGLang server?")
        self._paths = frozenset(paths)
        info = await self.server_info()
        self.version = str(field_of(info, "version", f"{self.url}/server_info"))
        self.tensor_parallel_size = _count(field_of(info, "tp_size", f"{self.url}/server_info"), self.name)
        missing = [path for path in NEEDED if path not in paths]
        if missing:
            raise EngineError(
                f"{self.name} ({self.url}) is SGLang {self.version} without {', '.join(missing)}: use 0.5.23, which "
                "this is tested with"
            )
        self.update_session = "/begin_weight_update" in paths

    async def is_up(self, timeout: float) -> bool:
        """Whether it answers at all, paused or not; ``/health`` has it generate a token."""
        return await self._client.answers(f"{self.url}/model_info", timeout)

    async def is_healthy(self, timeout: float = 5.0) -> bool:
        return await self._client.answers(f"{self.url}/health", timeout)

    async def server_info(self) -> dict[str, Any]:
        return await self._described("server_info")

    async def model_info(self) -> dict[str, Any]:
        return await self._described("model_info")

    async def _described(self, path: str) -> dict[str, Any]:
        info = await self._client.get(f"{self.url}/{path}")
        if not isinstance(info, dict):
            raise EngineError(f"{self.url}/{path} answered with no table; is {self.name} an SGLang server?")
        return info

    async def weight_version(self) -> str:
        """EngineError where it has none: what weights it holds is then not known."""
        try:
            return str(field_of(await self.model_info(), "weight_version", f"{self.url}/model_info"))
        except EngineError as error:
            raise EngineError(f"{self.name}: its weight_version is not known: {error}") from error

    async def pause(self, mode: str) -> None:
        """A ``PauseMode``: SGLang has the same three, under the same names. Returns once nothing runs."""
        await self._control("pause_generation", mode=mode)

    async def resume(self) -> None:
        await self._control("continue_generation")

    async def abort(self, request_id: str | None) -> None:
        await self._control("abort_request", **({"abort_all": True} if request_id is None else {"rid": request_id}))

    async def forget(self, request_id: str) -> None:
        """Abort a request whose caller has gone, if the server answers soon."""
        await self._client.post(f"{self.url}/abort_request", {"rid": request_id}, timeout=_FORGET_TIMEOUT, retries=0)

    async def flush(self) -> None:
        await self._control("flush_cache")

    async def release_memory(self, tags: tuple[str, ...], timeout: float) -> None:
        await self.post("release_memory_occupation", {"tags": server_tags(tags)}, timeout)

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        await self._control("resume_memory_occupation", tags=server_tags(tags))

    async def begin_update(self) -> None:
        if not self.update_session:
            return
        if self._in_session:  # of an update that failed in the middle
            await self.end_update()
        await self._control("begin_weight_update")
        self._in_session = True

    async def end_update(self) -> None:
        if self.update_session:
            await self._control("end_weight_update")
            self._in_session = False

    async def update_from_tensors(self, packed: str, version: str | None, *, flush: bool) -> None:
        """``packed``: base64 of the pickled list of (name, whole tensor). Each tensor-parallel rank takes its part."""
        serialized = [packed] * self.tensor_parallel_size
        body: dict[str, Any] = {"serialized_named_tensors": serialized, "flush_cache": flush}
        await self._update("update_weights_from_tensor", body, version)

    async def update_from_disk(self, directory: Path, version: str, *, flush: bool = True) -> None:
        """Load every tensor of the directory. No request is answered meanwhile, paused or not."""
        body: dict[str, Any] = {"model_path": str(directory), "load_format": "auto"}  # it has dummy weights so far
        body["flush_cache"] = flush
        await self._update("update_weights_from_disk", body, version)

    async def join_group(self, group: str, *, host: str, port: int, offset: int, size: int, backend: str) -> None:
        """Make its ranks, from ``offset`` on, members of a group of ``size`` whose store is at ``host``. Returns when
        all are there."""
        body = {"master_address": host, "master_port": port, "rank_offset": offset, "world_size": size}
        await self._update("init_weights_update_group", body | {"group_name": group, "backend": backend}, None)

    async def leave_group(self, group: str) -> None:
        await self._update("destroy_weights_update_group", {"group_name": group}, None)

    async def update_from_group(
        self, group: str, *, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None:
        """Take these tensors as rank 0 of ``group`` broadcasts them, one by one."""
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
        await self._update("update_weights_from_distributed", body | {"flush_cache": False}, None)

    async def set_version(self, version: str) -> None:
        await self._control("update_weight_version", new_version=version, abort_all_requests=False)

    def check_has(self, paths: tuple[str, ...], flag: str) -> None:
        """EngineError where it lacks what ``flag`` needs."""
        missing = [path for path in paths if path not in self._paths]
        if missing:
            raise EngineError(
                f"{self.name} ({self.url}) is SGLang {self.version} without {', '.join(missing)}, which {flag} needs: "
                "use 0.5.23, which this is tested with, or another channel"
            )

    async def post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        return await self._client.post(f"{self.url}/{path}", body, timeout=timeout)

    async def stop(self) -> None:
        """End it; somebody else's goes on."""
        if self._process is not None:
            await self._process.stop()

    def last_words(self) -> str:
        return self._process.last_words() if self._process is not None else ""

    async def _update(self, path: str, body: dict[str, Any], version: str | None) -> None:
        body = body if version is None else body | {"weight_version": version}
        # One try: a second one could meet half of the first.
        answer = await self._client.post(f"{self.url}/{path}", body, timeout=_UPDATE_TIMEOUT, retries=0)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            said = answer.get("message") if isinstance(answer, dict) else repr(answer)[:200]
            raise EngineError(f"{self.name} did not take new weights: {said}")

    async def _control(self, path: str, **body: Any) -> None:
        await self._client.post(f"{self.url}/{path}", body, timeout=_CONTROL_TIMEOUT)


def _count(value: Any, server: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise EngineError(f"{server}: its tp_size is {value!r}, which is no number") from None


async def all_of(*calls: Any) -> list[Any]:
    """Await all, whichever fails; then raise the first failure."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def first_failure(*calls: Coroutine[Any, Any, None]) -> None:
    """Await all; the first that fails cancels the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
