"""``--rm-type remote_rm``: a reward service that is asked over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
from collections import Counter
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp

from rollout.rewards.base import CallReward, RewardError
from rollout.rm_types import check_rm_url
from samples.errors import InputError
from samples.sample import Sample

FIRST_BACKOFF_SECONDS = 0.5  # doubled with each retry, up to the longest; each wait is drawn from [half, whole]
LONGEST_BACKOFF_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 20


class ServiceFailure(Exception):
    """One attempt that may be repeated: no connection, no answer in time, or a status of 500 and above."""


class RemoteReward(CallReward):
    """POSTs ``{prompt, response, label, metadata, source, status, index, group_index}`` as JSON.

    The answer is a JSON number, or an object whose ``--reward-key`` is one. Each attempt may take ``timeout`` seconds.
    Failed connections, timeouts and statuses from 500 are tried again up to ``retries`` times; any other status than
    200 is final. The service's own words stand in the error.
    """

    def __init__(
        self, url: str | None, *, timeout: float, concurrency: int, retries: int, reward_key: str | None
    ) -> None:
        self._url = check_rm_url(url)
        super().__init__(f"--rm-type remote_rm ({self._url})", concurrency=concurrency, reward_key=reward_key)
        self._timeout = timeout
        self._concurrency = concurrency
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None
        self._counts: Counter[str] = Counter()

    async def _call(self, sample: Sample) -> object:
        payload = self._payload(sample)
        failures: list[str] = []
        while True:
            try:
                async with self._slots:  # a call that waits for its next try holds no slot
                    return await self._attempt(payload, sample.index)
            except ServiceFailure as failure:
                failures.append(str(failure))
            if len(failures) > self._retries:
                told = failures[-1] if len(set(failures)) == 1 else "; ".join(dict.fromkeys(failures))
                raise RewardError(
                    f"{self.name} gave no reward for sample {sample.index} in {len(failures)} attempts "
                    f"(--rm-retries {self._retries}): {told}"
                )
            self._counts["retries"] += 1
            await asyncio.sleep(backoff_seconds(len(failures)))

    async def _attempt(self, payload: bytes, index: int | None) -> object:
        headers = {"Content-Type": "application/json"}
        try:
            # A redirect would turn the POST into a GET: it is an answer like any other status that is not 200.
            async with self._open_session().post(
                self._url, data=payload, headers=headers, allow_redirects=False
            ) as reply:
                body = await _read(reply)
        except TimeoutError:
            self._counts["timeouts"] += 1
            raise ServiceFailure(f"no answer within --rm-timeout {self._timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise ServiceFailure(f"{type(error).__name__}: {error}") from error
        said = f"status {reply.status} {reply.reason}: {_shown(body)}"
        if reply.status >= 500:
            raise ServiceFailure(said)
        if reply.status != 200:
            raise RewardError(f"{self.name} refused sample {index} with {said}")
        try:
            return json.loads(body)
        except RecursionError:
            raise RewardError(
                f"{self.name} answered sample {index} with JSON that is nested too deep: {_shown(body)}"
            ) from None
        except ValueError:
            raise RewardError(
                f"{self.name} answered sample {index} with something that is not JSON: {_shown(body)}"
            ) from None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # here, because a session belongs to the event loop that it is opened in
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=aiohttp.TCPConnector(limit=self._concurrency),
                # Proxies of the environment are for the way out; a service on this machine is reached directly.
                trust_env=not is_loopback(self._url),
            )
        return self._session

    def _payload(self, sample: Sample) -> bytes:
        fields = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
            "source": sample.source,
            "status": sample.status.value,
            "index": sample.index,
            "group_index": sample.group_index,
        }
        try:
            return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.name}: sample {sample.index} cannot be sent as JSON: {error}") from None

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    async def _release(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def backoff_seconds(failures: int) -> float:
    """How long to wait after so many failures; random, lest all callers return to a restarted service at once."""
    longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 20))
    return random.uniform(longest / 2, longest)


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise RewardError(
                f"the reward service's answer is longer than {MAX_ANSWER_BYTES} bytes: {_shown(bytes(body))}"
            )
    return bytes(body)


def _shown(body: bytes) -> str:
    text = body[:2000].decode("utf-8", errors="replace").strip()
    return (text if len(text) <= 500 else text[:500] + "...") or "(empty)"
