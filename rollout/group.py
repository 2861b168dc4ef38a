"""What becomes of one group, in training and in evaluation alike: answered, hooked, scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from hooks import apply_rollout_sample_hooks
from rollout.engines.protocol import Engine, SamplingParams
from rollout.generation import generate_sample
from rollout.rewards import Reward
from samples.sample import Group, Status


class HookArgs(Protocol):
    """What is needed of the ``args`` that a user's functions see."""

    reward_key: str | None


class GroupRunner:
    """Takes groups through engine, sample hooks and reward; several may be under way at once."""

    def __init__(self, engine: Engine, reward: Reward, args: HookArgs, *, seed: int, max_context_len: int) -> None:
        self._engine = engine
        self._reward = reward
        self._args = args
        self._seed = seed
        self._max_context_len = max_context_len

    async def run(
        self,
        group: Group,
        params: SamplingParams,
        *,
        rollout_id: int,
        evaluation: bool = False,
        stream: int | None = None,
    ) -> float:
        """Finish ``group`` in place and return the seconds that scoring it took; a hook may have emptied it.

        ``stream`` stands in for the rollout id where random numbers are drawn (default: the rollout id itself).
        """
        group_index = group[0].group_index
        await self.answer(group, params, rollout_id=rollout_id, stream=stream)
        return await self.finish(group, rollout_id=rollout_id, evaluation=evaluation, group_index=group_index)

    async def answer(self, group: Group, params: SamplingParams, *, rollout_id: int, stream: int | None = None) -> None:
        """Generate what ``group`` still lacks. Samples may end ABORTED: such a group is not ready for ``finish``."""
        for sample in group:
            sample.rollout_id = rollout_id if stream is None else stream
        await run_all(
            [
                generate_sample(self._engine, sample, params, seed=self._seed, max_context_len=self._max_context_len)
                for sample in group
                if sample.status in (Status.PENDING, Status.ABORTED)
            ]
        )
        for sample in group:
            sample.rollout_id = rollout_id

    async def finish(
        self, group: Group, *, rollout_id: int, evaluation: bool = False, group_index: int | None = None
    ) -> float:
        """Apply hooks to an answered group and score it, in place; the seconds that scoring took."""
        group[:] = await apply_rollout_sample_hooks(
            self._args, group, rollout_id=rollout_id, evaluation=evaluation, group_index=group_index
        )
        started = time.perf_counter()
        await self._reward.score_group(group)
        for sample in group:
            sample.apply_reward_adjustment(self._args.reward_key)
        return time.perf_counter() - started


async def run_all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines side by side; the first error cancels the others, waits until they end, and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
