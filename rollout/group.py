"""What becomes of one group, in training and in evaluation alike: answered, hooked, scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from hooks import load_sample_hooks
from observability.rollout_metrics import leaves_of
from rollout.custom.generate import CustomGenerate, Generated
from rollout.engines.protocol import Engine, GenerateRequest, GenerateResult, SamplingParams
from rollout.generation import generate_sample
from rollout.rewards import Reward
from rollout.rewards.values import checked_reward
from samples.sample import Group, Sample, Status

_GIVEN = "a sample hook, or the function that generated it,"
_ADJUSTED = "the reward and a hook's reward_adjustment"
_UNFINISHED = (Status.PENDING, Status.ABORTED)


class HookArgs(Protocol):
    """What is needed of the ``args`` that a user's functions see."""

    reward_key: str | None
    rollout_sample_hook_path: Any


class GroupRunner:
    """Takes groups through engine, sample hooks and reward; several may be under way at once.

    ``generate``: the user's function in the place of ours. With it a response may become several samples: the group
    then holds a list in its place. ``mask_offpolicy``: tokens of an unfinished response that older weights wrote take
    no gradient once it goes on.
    """

    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        args: HookArgs,
        *,
        seed: int,
        max_context_len: int,
        generate: CustomGenerate | None = None,
        mask_offpolicy: bool = False,
    ) -> None:
        self._engine = engine
        self._reward = reward
        self._args = args
        self._hooks = load_sample_hooks(args)  # None where there are none: then nothing is called for a sample
        self._seed = seed
        self._max_context_len = max_context_len
        self._generate = generate
        self._mask_offpolicy = mask_offpolicy
        self._stopping = False
        self._requests = _Requests(engine)

    async def stop(self) -> None:
        """Abort every answer of this runner, and until ``go_on`` every one that is asked for: samples end ABORTED.

        Others' requests, such as those of an evaluation, go on.
        """
        self._stopping = True
        await run_all([self._engine.abort(request_id) for request_id in list(self._requests.active)])

    def go_on(self) -> None:
        self._stopping = False

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
        await self.answer(group, params, rollout_id=rollout_id, evaluation=evaluation, stream=stream)
        return await self.finish(group, rollout_id=rollout_id, evaluation=evaluation, group_index=group_index)

    async def answer(
        self,
        group: Group,
        params: SamplingParams,
        *,
        rollout_id: int,
        evaluation: bool = False,
        stream: int | None = None,
    ) -> None:
        """Generate what ``group`` still lacks. Samples may end ABORTED: such a group is not ready for ``finish``."""
        for sample in leaves_of(group):
            sample.rollout_id = rollout_id if stream is None else stream
            if self._mask_offpolicy and sample.response_length and not self._is_current(sample):
                sample.loss_mask = [0] * sample.response_length
        members: list[Any] = list(group)
        group[:] = await run_all([self._member(member, params, evaluation) for member in members])
        for sample in leaves_of(group):
            sample.rollout_id = rollout_id

    async def finish(
        self, group: Group, *, rollout_id: int, evaluation: bool = False, group_index: int | None = None
    ) -> float:
        """Apply hooks to an answered group and score what has no reward, in place; the seconds that scoring took."""
        if self._hooks is not None:
            context = {"rollout_id": rollout_id, "evaluation": evaluation, "group_index": group_index}
            group[:] = await self._hooks.apply(self._args, group, context)
        started = time.perf_counter()
        everything = list(leaves_of(group))
        unscored = [sample for sample in everything if sample.reward is None]
        if unscored:
            await self._reward.score_group(everything if self._reward.compares else unscored)
        key, ours = self._args.reward_key, set(map(id, unscored))
        for sample in everything:
            # What the reward gave is checked; what came with the sample, or a hook adds, is a user's too.
            if sample.reward is not None and id(sample) not in ours:
                sample.reward = checked_reward(sample.reward, _GIVEN, sample.index, key)
            if sample.reward is not None and sample.reward_adjustment:
                sample.apply_reward_adjustment(key)
                checked_reward(sample.reward, _ADJUSTED, sample.index, key)
        return time.perf_counter() - started

    async def _member(self, member: Sample | list[Sample], params: SamplingParams, evaluation: bool) -> Generated:
        if not isinstance(member, Sample) or member.status not in _UNFINISHED:
            return member
        if self._stopping:
            member.status = Status.ABORTED
            return member
        settings: dict[str, Any] = {"seed": self._seed, "max_context_len": self._max_context_len}
        if self._generate is not None:
            settings["stopping"] = lambda: self._stopping
            return await self._generate(self._requests, member, params, evaluation=evaluation, **settings)
        await generate_sample(self._requests, member, params, **settings)
        return member

    def _is_current(self, sample: Sample) -> bool:
        return sample.last_weight_version == self._engine.weight_version


class _Requests:
    """The engine's ``generate``, and which requests of this runner are under way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.active: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.active.add(request.request_id)
        try:
            return await self._engine.generate(request)
        finally:
            self.active.discard(request.request_id)


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
