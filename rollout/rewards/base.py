"""What every reward does, and the bookkeeping that all rewards which take time share."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any

from rollout.rewards.values import checked_reward
from samples.errors import InputError
from samples.sample import Group, Sample
from samples.sample import Reward as RewardValue

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # how long close() waits for cancelled calls before it leaves them behind


class RewardError(InputError):
    """A reward could not be had: the function raised, took too long, or the service failed. Names the sample."""


class Reward(ABC):
    """Scores samples; used from one event loop, which it never blocks.

    ``score`` sets ``sample.reward`` and returns it: a float, or a dict whose ``--reward-key`` entry is a float.
    Anything else that a reward function returns raises ``InputError``.
    """

    compares = False  # whether a sample's reward depends on the others of its group, so that all are scored at once

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def score(self, sample: Sample) -> RewardValue: ...

    async def score_group(self, group: Group) -> list[RewardValue]:
        """Score all of ``group``, at once; when one fails the others are cancelled and its error is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(self.score(sample)) for sample in group]
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in scoring]

    def counters(self) -> Mapping[str, int]:
        """Events since the start that metrics should show, such as ``timeouts``."""
        return {}

    async def close(self) -> None:  # noqa: B027 - a reward without resources has nothing to close
        """Cancel pending calls and give resources back, within a bounded time. May be called twice."""


class CallReward(Reward):
    """A reward whose calls take time: at most ``concurrency`` under way at once, each cancellable by ``close``."""

    def __init__(self, name: str, *, concurrency: int, reward_key: str | None) -> None:
        super().__init__(name)
        self._slots = asyncio.Semaphore(concurrency)
        self._reward_key = reward_key
        self._pending: set[asyncio.Task[object]] = set()
        self._closed = False

    @abstractmethod
    async def _call(self, sample: Sample) -> object:
        """The raw value for one sample; implementations hold ``self._slots`` while they use what is scarce."""

    async def _release(self) -> None:
        """Give back what the implementation holds; no call of ours is awaited any more."""

    async def score(self, sample: Sample) -> RewardValue:
        if self._closed:
            raise RewardError(f"{self.name}: sample {sample.index} came after the reward was closed")
        value = await self._tracked(self._call(sample), sample)
        sample.reward = checked_reward(value, self.name, sample.index, self._reward_key)
        return sample.reward

    async def _tracked(self, call: Coroutine[Any, Any, object], sample: Sample) -> object:
        task = asyncio.ensure_future(call)
        self._pending.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # Ours (close) and not the caller's own cancellation: the caller goes on and must learn why.
            caller = asyncio.current_task()
            if self._closed and task.cancelled() and caller is not None and not caller.cancelling():
                raise RewardError(f"{self.name}: closed before sample {sample.index} was scored") from None
            raise
        finally:
            self._pending.discard(task)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        pending = set(self._pending)
        for task in pending:
            task.cancel()
        if pending:
            _, left = await asyncio.wait(pending, timeout=CLOSE_SECONDS)
            if left:
                logger.warning("%s: %d calls did not end when cancelled and are left behind", self.name, len(left))
        await self._release()
