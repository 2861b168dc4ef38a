"""Requests that are under way at the servers: sent to the router or past it, asked again, and aborted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from rollout.deploy.config import SGLangConfig
from rollout.deploy.router import AFFINITY_HEADER, Router
from rollout.engines.errors import EngineError
from rollout.engines.protocol import GenerateRequest, GenerateResult
from rollout.engines.sglang.command import SAMPLING_MASK_TOKENS, ServerSettings
from rollout.engines.sglang.http import HttpClient, Refusal, Unreachable
from rollout.engines.sglang.recovery import Recovery
from rollout.engines.sglang.requests import check_tokens, limit_of, needs_kept_ids, read_answer, request_body
from rollout.engines.sglang.server import SGLangServer, all_of
from rollout.engines.torch_engine.detokenize import Detokenizer
from samples.errors import InputError

_ABORT_EVERY = 1.0  # seconds; a request that was on its way when the servers were told is met by the next call
_ABORT_TIMEOUT = 60.0


class Generating:
    """Of one model's ``servers``, which ``recovery`` watches.

    ``in_flight``: our id of each request under way, and the one that servers know. ``generated``: tokens so far;
    ``later_tokens``: those of them that came after new weights had reached a request under way.
    """

    def __init__(
        self,
        settings: ServerSettings,
        config: SGLangConfig,
        client: HttpClient,
        router: Router,
        servers: Sequence[SGLangServer],
        recovery: Recovery,
        detokenizer: Detokenizer,
    ) -> None:
        self._settings, self._config, self._client = settings, config, client
        self._router, self._servers, self._recovery = router, servers, recovery
        self._detokenizer = detokenizer
        self.in_flight: dict[str, str] = {}
        self.generated = self.later_tokens = 0
        self._direct: Counter[str] = Counter()  # requests under way that went past the router, by server
        self._tries = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        limit = limit_of(request, self._settings.max_context_len)
        check_tokens(request, self._settings.vocab_size)
        if request.request_id in self.in_flight:
            raise InputError(f"request {request.request_id}: a request with this id is running already")
        # Ids are told apart by a number: a server may still be ending a request that was cancelled here.
        self._tries += 1
        # The last mark keeps one from being the beginning of another: servers abort all that begin with it.
        server_id = f"{request.request_id}#{self._tries}#"
        self.in_flight[request.request_id] = server_id
        mask_tokens = min(SAMPLING_MASK_TOKENS, self._settings.vocab_size)
        body = request_body(request, server_id, limit, mask_tokens)
        try:
            answer = await self._answer(request, body)
        except asyncio.CancelledError:
            await asyncio.shield(self._forget(server_id))
            raise
        except Refusal as refusal:
            raise _as_ours(request, refusal) from refusal
        finally:
            self.in_flight.pop(request.request_id, None)
        result = read_answer(request, answer, _version, lambda ids: self._detokenizer.decode_batch([ids])[0])
        self.generated += len(result.output_ids)
        self.later_tokens += sum(tokens for _, tokens in result.spans[1:])
        return result

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; return when they are answered. EngineError when they are not in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ABORT_TIMEOUT
        waited_for = [request_id] if request_id is not None else list(self.in_flight)
        while left := [name for name in waited_for if name in self.in_flight]:
            for server_id in [None] if request_id is None else [self.in_flight[name] for name in left]:
                await all_of(*(server.abort(server_id) for server in self._servers))
            wait_until = loop.time() + _ABORT_EVERY
            while loop.time() < wait_until and any(name in self.in_flight for name in left):
                await asyncio.sleep(0.01)
            if loop.time() > deadline:
                raise EngineError(f"{len(left)} request(s) were not answered {_ABORT_TIMEOUT:g} s after their abort")

    async def _answer(self, request: GenerateRequest, body: dict[str, Any]) -> Any:
        """The server's answer. A request that a server took with it when it died is asked again."""
        for attempt in count():
            await self._recovery.whole()
            # The router drops fields that it does not know, such as the one that asks for the kept ids.
            direct = self._least_busy() if needs_kept_ids(request) else None
            url = self._router.url if direct is None else direct
            if direct is not None:
                self._direct[direct] += 1
            try:
                return await self._client.post(
                    f"{url}/generate",
                    body,
                    timeout=self._config.sglang_request_timeout,
                    headers={AFFINITY_HEADER: _affinity(request)},
                    queues=True,
                )
            except Unreachable:
                # The watch has seen by now that a server is dead, if one is; else the fault is another.
                async with self._recovery.lock:
                    await self._recovery.check()
                if attempt >= self._config.max_engine_restarts:
                    raise
            finally:
                if direct is not None:
                    self._direct[direct] -= 1
        raise AssertionError("unreachable: the loop returns or raises")

    def _least_busy(self) -> str:
        up = [server.url for server in self._servers if server.url not in self._recovery.down]
        return min(up or [server.url for server in self._servers], key=lambda url: self._direct[url])

    async def _forget(self, server_id: str) -> None:
        """Abort a request whose caller has gone: whatever becomes of it interests nobody."""
        await asyncio.gather(*(server.forget(server_id) for server in self._servers), return_exceptions=True)


def _affinity(request: GenerateRequest) -> str:
    """Responses to one prompt share it, and with --router-policy manual a server and its cache."""
    return f"{request.rollout_id}-{hash(request.input_ids):x}"


def _as_ours(request: GenerateRequest, refusal: Refusal) -> Exception:
    kind = InputError if refusal.status == 400 else EngineError
    return kind(f"request {request.request_id}: {refusal}")


def _version(text: str) -> int:
    """The trainer's number; servers start with a word of their own."""
    return int(text) if text.lstrip("-").isdecimal() else -1
