"""Scoring in processes of its own, for scorers that evaluate what the model wrote.

A response can make such a scorer compute for ever, take all memory or crash. In a process, that costs the response its
reward and nothing else: the process is replaced, the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rollout.rewards.base import CallReward, RewardError
from rollout.rewards.threads import DaemonThreads
from samples.errors import InputError
from samples.sample import Sample

logger = logging.getLogger(__name__)

CPU_SECONDS = 5.0  # of one response, unless --rm-timeout is shorter; math-verify's own default
MEMORY_BYTES = 4 << 30  # of address space; SymPy and reasoning-gym need a tenth of it
START_SECONDS = 120.0  # importing SymPy from a cold network disk
MAX_PROCESSES = 8


class ProcessEnded(Exception):
    """A scoring process ended, or was ended, before it answered. ``cause`` says whose doing that was."""

    def __init__(self, how: str, cause: Literal["limit", "crash", "exit"]) -> None:
        super().__init__(how)
        self.cause = cause


class ScorerProcess:
    """One scoring process; asked by one thread at a time."""

    def __init__(self, kind: str, cpu_seconds: float) -> None:
        program = Path(__file__).with_name("scorer_worker.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            # -P: a folder of the user's must not shadow the packages that the scorer imports.
            [sys.executable, "-P", "-W", "ignore", str(program), kind, str(cpu_seconds), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._unread = b""

    def wait_ready(self) -> None:
        self._answer(START_SECONDS)

    def ask(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        """The answer to ``request``, or ``ProcessEnded`` when there is none within ``timeout`` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; reading below says how
            pass
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self.end()
                    raise ProcessEnded(f"no answer within {timeout:g} s", "limit")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise self._ended()
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _ended(self) -> ProcessEnded:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return ProcessEnded("its CPU time was used up", "limit")
        if code < 0:
            return ProcessEnded(f"it ended by {signal.Signals(-code).name}", "crash")
        return ProcessEnded(f"it exited with status {code}; its own words are on standard error", "exit")

    def end(self) -> None:
        """End the process now; a thread that waits for its answer gets ``ProcessEnded``."""
        self._process.kill()
        self._process.wait()

    def close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that it never read
                pipe.close()


class IsolatedReward(CallReward):
    """Scores in up to ``concurrency`` processes, started when first needed and kept.

    A response whose score takes more than the CPU time or ``timeout`` seconds, or that crashes the scorer twice, gets
    0.0 and is counted (``unscorable``).
    """

    def __init__(self, name: str, kind: str, *, timeout: float, concurrency: int) -> None:
        processes = min(concurrency, MAX_PROCESSES, os.cpu_count() or 1)
        super().__init__(name, concurrency=processes, reward_key=None)
        self._kind = kind
        self._timeout = timeout
        self._threads = DaemonThreads("scorer")
        self._lock = threading.Lock()
        self._idle: list[ScorerProcess] = []
        self._all: set[ScorerProcess] = set()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _request(self, sample: Sample) -> dict[str, object]:
        """What the scoring process is asked; raises ``InputError`` for a sample that cannot be scored."""

    async def _call(self, sample: Sample) -> object:
        request = self._request(sample)
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{self.name}: label or metadata of sample {sample.index} is not plain JSON: {error}"
            ) from None
        async with self._slots:
            answer = await self._threads.run(self._score, request, sample.index)
        if "unusable" in answer:
            raise RewardError(
                f"{self.name}: sample {sample.index} cannot be scored: {answer['unusable']} (label {sample.label!r})"
            )
        if "raised" in answer:
            self._unscorable(sample.index, answer["raised"])
        return answer["score"]

    def _score(self, request: Mapping[str, object], index: int | None) -> dict[str, Any]:
        """In a thread: ask an idle process. What is not a used-up limit gets one more try, in a new process."""
        for retried in (False, True):
            process = self._take()
            try:
                answer = process.ask(request, self._timeout)
            except ProcessEnded as ended:
                self._drop(process)
                if ended.cause == "limit" or (retried and ended.cause == "crash"):
                    return {"score": 0.0, "raised": str(ended)}
                if retried:
                    raise RewardError(f"{self.name}: the scoring process fails on sample {index}: {ended}") from ended
            else:
                self._put_back(process)
                return answer
        raise AssertionError("unreachable")

    def _unscorable(self, index: int | None, why: str) -> None:
        self._counts["unscorable"] += 1
        if self._counts["unscorable"] <= 5:  # a policy can produce thousands; the metric goes on counting
            logger.warning("%s: sample %s gets 0.0, its response could not be scored: %s", self.name, index, why)

    def _take(self) -> ScorerProcess:
        with self._lock:
            if self._closed:
                raise RewardError(f"{self.name} is closed")
            if self._idle:
                return self._idle.pop()
            process = ScorerProcess(self._kind, min(self._timeout, CPU_SECONDS))
            self._all.add(process)
        try:
            process.wait_ready()
        except ProcessEnded as ended:
            self._drop(process)
            raise RewardError(f"{self.name}: a scoring process did not start: {ended}") from None
        return process

    def _put_back(self, process: ScorerProcess) -> None:
        with self._lock:
            if process in self._all:
                self._idle.append(process)
                return
        process.close_pipes()  # closed meanwhile

    def _drop(self, process: ScorerProcess) -> None:
        with self._lock:
            self._all.discard(process)
        process.end()
        process.close_pipes()

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    async def _release(self) -> None:
        with self._lock:
            processes, idle = list(self._all), list(self._idle)
            self._all.clear()
            self._idle.clear()
        for process in processes:
            process.end()
        for process in idle:  # a busy one is its thread's, which sees the end of the pipe and closes it
            process.close_pipes()
        self._threads.close()
