"""Requests to servers: one connection pool for the run, bounded retries, the server's words in ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rollout.engines.errors import EngineError

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.2, 5.0  # seconds
_SPARE = 32  # connections for what does not queue
_MOST_BYTES = 1 << 30  # of one answer; the longest responses with all their kept ids are far below
_SHOWN = 600  # characters of an answer that a message repeats
_TRY_AGAIN = frozenset({502, 503, 504})  # a router without a worker, for now
_ROUTER_LOST_WORKER = b"error sending request"  # its words, with status 500, for a connection to a worker that broke


class Refusal(EngineError):
    """The server answered and did not do it. ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(EngineError):
    """No answer after all retries: no connection, a broken one, or no answer in time."""


class TooSlow(EngineError):
    """The server did not finish a response in the time that one may take. It is not asked again: it had that time."""


class HttpClient:
    """``timeout`` bounds one try, in seconds; ``retries`` are further tries where no connection came about or it broke.

    At most ``connections`` requests that queue are under way at once; others, such as those that ask after a server's
    health, do not stand behind them. A status from 300 on is a Refusal at once, except for those of a router that has
    no worker at the moment; redirections are not followed. An answer is JSON where the server says so, else text.
    """

    def __init__(self, *, connections: int, retries: int = 5, timeout: float = 60.0) -> None:
        self._connections, self._retries, self._timeout = connections, retries, timeout
        self._places = asyncio.Semaphore(connections)
        self._session: aiohttp.ClientSession | None = None
        self.retried = 0  # tries beyond the first, of all requests so far

    async def post(
        self,
        url: str,
        body: dict[str, Any],
        *,
        timeout: float | None = None,
        retries: int | None = None,
        headers: Mapping[str, str] | None = None,
        queues: bool = False,
    ) -> Any:
        """The answer. ``timeout`` 0: none; with ``queues`` it begins once there is a place, and its end is TooSlow."""
        if queues:
            async with self._places:
                return await self._request("POST", url, body, timeout, retries, headers, waits_once=True)
        return await self._request("POST", url, body, timeout, retries, headers)

    async def get(self, url: str, *, timeout: float | None = None, retries: int | None = None) -> Any:
        return await self._request("GET", url, None, timeout, retries)

    async def delete(self, url: str, *, timeout: float | None = None) -> Any:
        return await self._request("DELETE", url, None, timeout, None)

    async def answers(self, url: str, timeout: float = 5.0) -> bool:
        """Whether a GET is answered with 200 now."""
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._open().get(url, timeout=limit, allow_redirects=False) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # trust_env is off: a proxy of the environment is not for servers of the run.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._connections + _SPARE))
        return self._session

    async def _request(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        timeout: float | None,
        retries: int | None,
        headers: Mapping[str, str] | None = None,
        *,
        waits_once: bool = False,
    ) -> Any:
        tries = 1 + (self._retries if retries is None else retries)
        limit = aiohttp.ClientTimeout(total=self._timeout if timeout is None else timeout or None, sock_connect=10.0)
        problems: list[str] = []
        for number in range(tries):
            if number:
                self.retried += 1
                await asyncio.sleep(min(_FIRST_BACKOFF * 2 ** (number - 1), _LONGEST_BACKOFF))
            try:
                async with self._open().request(
                    method, url, json=body, timeout=limit, headers=headers, allow_redirects=False
                ) as reply:
                    content = await _content(reply, f"{method} {url}")
                    if reply.status < 300:
                        return _decoded(content, reply.content_type, f"{method} {url}")
                    said = f"{method} {url}: status {reply.status} {reply.reason}: {_shown(content)}"
                    if reply.status not in _TRY_AGAIN and _ROUTER_LOST_WORKER not in content:
                        raise Refusal(said, reply.status)
                    problems.append(said)
            except aiohttp.ConnectionTimeoutError as error:
                problems.append(f"{method} {url}: {type(error).__name__}: {error}")
            except TimeoutError:
                if waits_once:
                    raise TooSlow(f"{method} {url}: no answer within {limit.total:g} s") from None
                problems.append(f"{method} {url}: no answer within {limit.total or limit.sock_connect:g} s")
            except (aiohttp.ClientError, OSError) as error:
                problems.append(f"{method} {url}: {type(error).__name__}: {error}")
        told = "; ".join(dict.fromkeys(problems))
        raise Unreachable(f"{told} ({tries} {'try' if tries == 1 else 'tries'})")


def field_of(answer: Any, name: str, said_by: str) -> Any:
    """What a server's answer has under ``name``. EngineError where it has no such thing, or is no table at all."""
    if not isinstance(answer, dict) or name not in answer:
        shown = repr(answer)[:_SHOWN]
        raise EngineError(f"{said_by} answered without {name!r}: {shown}; is it an SGLang server, or its router?")
    return answer[name]


async def _content(reply: aiohttp.ClientResponse, asked: str) -> bytes:
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > _MOST_BYTES:
            raise EngineError(f"{asked}: the answer has more than {_MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _decoded(content: bytes, content_type: str, asked: str) -> Any:
    if content_type != "application/json":
        return content.decode(errors="replace")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{asked}: the answer says that it is JSON and is no JSON: {error}") from error


def _shown(content: bytes) -> str:
    """The server's own words: of SGLang's and the router's JSON the message alone."""
    text = content.decode(errors="replace").strip()
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail")
    text = said if isinstance(said, str) else text
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
