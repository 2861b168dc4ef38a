"""Over-sampling in the synchronous collector: first come first kept, what is left, and what it goes on from.

The engine answers a token at a time, in an order that the test decides.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import filters
from filters import DynamicFilterOutput
from rollout.collectors.sync import SyncCollector
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.protocol import FinishReason, GenerateRequest, GenerateResult
from rollout.rewards.custom import CustomReward
from rollout.testing import EchoEngine
from samples import InputError, Sample, Status
from samples.config import DataConfig
from samples.custom_source import CustomDataSource
from samples.sample import Group
from tests.rollout.custom_cases import Counting as Numbers

SIZE = 2


class SlowEngine(EchoEngine):
    """Gives token after token, ``length`` of them; ``steps(sample index)`` event-loop turns go by for each."""

    def __init__(self, steps: Callable[[int], int], length: int = 4) -> None:
        super().__init__(length)
        self._steps = steps
        self._aborted: set[str] = set()

    async def abort(self, request_id: str | None = None) -> None:
        assert request_id is not None
        self._aborted.add(request_id)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        ids: list[int] = []
        reason = FinishReason.STOP
        while request.first_position + len(ids) < self._length:
            for _ in range(self._steps(request.sample_index)):
                await asyncio.sleep(0)
            if request.request_id in self._aborted:
                reason = FinishReason.ABORT
                break
            ids.append(65 + request.first_position + len(ids))
        logs = [-0.1 * (self.weight_version + 1)] * len(ids)
        return GenerateResult(request.request_id, ids, logs, reason, "".join(map(chr, ids)), self.weight_version)


@dataclass
class Setup:
    collector: SyncCollector
    engine: Any
    source: CustomDataSource
    judged: list[int] = field(default_factory=list)

    async def collect(self, rollout_id: int) -> list[int]:
        self.output = await self.collector.collect(rollout_id)
        self.engine.weight_version += 1
        return [group[0].group_index for group in self.output.groups]

    def metric(self, name: str) -> float:
        return self.output.metrics[f"rollout/dynamic_filter/{name}"]


def source_of_numbers() -> CustomDataSource:
    return CustomDataSource(
        Endless, DataConfig(), None, path="m.Numbers", seed=0, n_samples_per_prompt=SIZE, max_prompt_len=9
    )


class Endless(Numbers):
    def get_samples(self, n: int) -> list[Group]:
        first, self.at = self.at, self.at + n
        return [[Sample(prompt=str(i), tokens=[1, 2]) for _ in range(SIZE)] for i in range(first, self.at)]


def setup(
    steps: Callable[[int], int] = lambda index: 1,
    keeps: Callable[[int], Any] = lambda index: True,
    engine: Any = None,
    **settings: Any,
) -> Setup:
    config = RolloutConfig(
        **({"rollout_batch_size": 2, "n_samples_per_prompt": SIZE, "over_sampling_batch_size": 4} | settings)
    )
    judged: list[int] = []

    def judge(args: Any, group: Group) -> Any:
        assert group[0].group_index is not None
        judged.append(group[0].group_index)
        return keeps(group[0].group_index)

    async def reward(args: Any, sample: Sample) -> float:
        return float(sample.index or 0)

    engine = engine or SlowEngine(steps)
    source = source_of_numbers()
    collector = SyncCollector(
        config, RewardConfig(), engine=engine, source=source, dynamic_filter=judge, seed=0, max_context_len=64,
        reward=CustomReward(reward, "m.reward", None, timeout=9, concurrency=99, reward_key=None),
    )  # fmt: skip
    return Setup(collector, engine, source, judged)


def slow_groups(*slow: int, by: int = 50) -> Callable[[int], int]:
    """Groups that take ``by`` turns for a token, the others one."""
    return lambda index: by if index // SIZE in slow else 1


def old_tokens(sample: Sample) -> int:
    """Tokens that the first weights wrote; there are some, and not all are."""
    assert sample.rollout_log_probs is not None
    count = sum(round(value, 1) == -0.1 for value in sample.rollout_log_probs)
    assert 0 < count < 4
    return count


async def test_first_come_is_first_kept_and_the_order_is_that_of_the_index():
    made = setup(lambda index: {0: 9, 1: 50, 2: 50, 3: 1}[index // SIZE])
    assert await made.collect(0) == [0, 3]
    assert made.judged == [3, 0]
    assert made.metric("groups_aborted") == 2
    assert [sample.train_step for group in made.output.groups for sample in group] == [0] * 4


async def test_aborted_prompts_are_first_in_line_and_begin_again():
    made = setup(slow_groups(0, 1))
    assert await made.collect(0) == [2, 3]
    made.engine._steps = lambda index: 1
    assert await made.collect(1) == [0, 1]
    for group in made.output.groups:
        assert [(s.response, s.loss_mask, s.rollout_log_probs) for s in group] == [("ABCD", [1] * 4, [-0.2] * 4)] * 2


async def test_a_partial_rollout_goes_on_where_it_stopped_with_the_old_log_probabilities():
    made = setup(slow_groups(0, 1, by=13), partial_rollout=True)
    assert await made.collect(0) == [2, 3]
    made.engine.requests.clear()
    made.engine._steps = lambda index: 1
    assert await made.collect(1) == [0, 1]
    for group in made.output.groups:
        for sample in group:
            assert sample.response == "ABCD"
            assert sample.rollout_log_probs is not None
            old = old_tokens(sample)
            assert [round(value, 1) for value in sample.rollout_log_probs] == [-0.1] * old + [-0.2] * (4 - old)
            assert sample.loss_mask == [1] * 4
            assert (sample.weight_version, sample.last_weight_version, sample.rollout_id) == (0, 1, 1)
    resumed = [request for request in made.engine.requests if request.sample_index < 4]
    assert [request.first_position for request in resumed] == [
        old_tokens(sample) for group in made.output.groups for sample in group
    ]


async def test_only_tokens_of_older_weights_are_masked_when_asked():
    """slime 1440: the mask hit new tokens."""
    made = setup(slow_groups(0, 1, by=13), partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    await made.collect(0)
    made.engine._steps = lambda index: 1
    await made.collect(1)
    for sample in [sample for group in made.output.groups for sample in group]:
        assert sample.loss_mask == [0] * old_tokens(sample) + [1] * (4 - old_tokens(sample))


async def test_tokens_of_the_same_weights_are_not_masked():
    made = setup(slow_groups(0, 1, by=13), partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    await made.collect(0)
    made.engine._steps = lambda index: 1
    made.engine.weight_version = 0  # as in a run without training
    await made.collect(1)
    assert [sample.loss_mask for group in made.output.groups for sample in group] == [[1] * 4] * 4


async def test_a_finished_response_of_an_aborted_group_is_kept_and_not_gone_on_with():
    made = setup(lambda index: {0: 1, 1: 50}.get(index, 2), partial_rollout=True)
    await made.collect(0)
    made.engine._steps = lambda index: 1
    made.engine.requests.clear()
    await made.collect(1)
    group = next(g for g in made.output.groups if g[0].group_index == 0)
    assert [sample.response for sample in group] == ["ABCD", "ABCD"]
    assert 0 not in {request.sample_index for request in made.engine.requests}
    assert group[0].weight_version == 0


@pytest.mark.parametrize("keep", [False, True])
async def test_finished_surplus_waits_or_its_prompts_come_first(keep: bool):
    made = setup(keep_surplus_groups=keep)
    assert await made.collect(0) == [0, 1]
    assert made.metric("groups_surplus") + made.metric("groups_aborted") == 2
    surplus = int(made.metric("groups_surplus"))
    assert surplus == 2
    made.judged.clear()
    assert await made.collect(1) == [2, 3]
    assert made.metric("groups_carried_over") == (surplus if keep else 0)
    assert {s.weight_version for group in made.output.groups for s in group} == ({0} if keep else {1})
    assert (made.judged == []) is keep


async def test_kept_surplus_survives_a_save_and_a_resume():
    made = setup(keep_surplus_groups=True)
    await made.collect(0)
    state = await made.collector.state()
    assert [entry.index for entry in state.waiting] == [2, 3]
    json.dumps([state.source, state.facts])
    resumed = setup(keep_surplus_groups=True)
    resumed.collector.restore(state)
    assert await resumed.collect(1) == [2, 3]
    assert resumed.judged == []
    without = setup()
    without.collector.restore(state)
    without.engine.weight_version = 7
    assert await without.collect(1) == [2, 3]
    assert without.output.groups[0][0].weight_version == 7


async def test_a_partial_rollout_survives_a_save_and_a_resume():
    made = setup(slow_groups(0, 1, by=13), partial_rollout=True)
    await made.collect(0)
    state = await made.collector.state()
    resumed = setup(partial_rollout=True)
    resumed.collector.restore(type(state)(json.loads(json.dumps(state.source)), state.facts, state.waiting))
    resumed.engine.weight_version = 1
    assert await resumed.collect(1) == [0, 1]
    assert [s.weight_version for group in resumed.output.groups for s in group] == [0] * 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("keep", [False, True])
async def test_every_prompt_is_trained_on_dropped_or_still_there_exactly_once(seed: int, partial: bool, keep: bool):
    import random

    draw = random.Random(seed)
    speeds = [draw.choice([1, 1, 2, 5, 20]) for _ in range(400)]
    rejected = {index for index in range(200) if draw.random() < 0.3}
    made = setup(
        lambda index: speeds[index], lambda index: index not in rejected, partial_rollout=partial,
        keep_surplus_groups=keep, rollout_batch_size=3, over_sampling_batch_size=draw.choice([3, 5, 8]),
    )  # fmt: skip
    trained: list[int] = []
    dropped = 0
    for rollout_id in range(6):
        indices = await made.collect(rollout_id)
        assert indices == sorted(indices)
        trained += indices
        dropped += int(made.metric("groups_dropped"))
    state = await made.collector.state()
    left = [group[0]["group_index"] for group in state.source["waiting"]] + [entry.index for entry in state.waiting]
    assert len(trained) == len(set(trained)) == 18
    assert not set(trained) & set(left)
    assert len(left) == len(set(left))
    assert len(trained) + dropped + len(left) == state.source["next_group"]


async def test_an_error_of_one_group_ends_the_rollout_with_that_error_and_nothing_runs_on():
    class Broken(SlowEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if request.sample_index == 5:
                raise OSError("engine gone")
            return await super().generate(request)

    made = setup(engine=Broken(slow_groups(0, 1, 3)))
    with pytest.raises(OSError, match="engine gone"):
        await made.collect(0)
    assert len(asyncio.all_tasks()) == 1


async def test_the_fallback_fills_a_batch_without_spread_in_exactly_one_round(caplog: pytest.LogCaptureFixture):
    """verl 953, 1108: every reward zero, dynamic sampling aborts or never ends."""
    verdict = DynamicFilterOutput(keep=False, reason="zero_std_0.0", keep_when_insufficient=True)
    made = setup(keeps=lambda index: verdict, over_sampling_batch_size=None, rollout_batch_size=4)
    with caplog.at_level(logging.WARNING):
        assert await made.collect(0) == [0, 1, 2, 3]
        assert await made.collect(1) == [4, 5, 6, 7]
    assert made.metric("rounds") == 1
    assert made.metric("groups_by_fallback") == 4
    assert all(sample.metadata["kept_by_fallback"] for group in made.output.groups for sample in group)
    assert caplog.text.count("keeps every group of a first round by its fallback") == 1


async def test_with_over_sampling_the_fallback_keeps_no_more_than_the_batch():
    verdict = DynamicFilterOutput(keep=False, reason="zero_std_0.0", keep_when_insufficient=True)
    made = setup(keeps=lambda index: verdict, over_sampling_batch_size=6, rollout_batch_size=4)
    assert len(await made.collect(0)) == 4
    assert [made.metric(name) for name in ("rounds", "groups_dropped", "groups_by_fallback")] == [1, 2, 4]


@pytest.mark.parametrize("over", [None, 4])
async def test_the_strict_filter_runs_into_the_bound_which_says_what_was_drawn(over: int | None):
    verdict = DynamicFilterOutput(keep=False, reason="zero_std_0.0")
    made = setup(
        keeps=lambda index: verdict, over_sampling_batch_size=over, rollout_batch_size=4, max_sampling_rounds=3
    )
    with pytest.raises(InputError, match=r"12 groups drawn in 3 rounds, 0 kept, 12 dropped \(12 zero_std_0.0\)"):
        await made.collect(0)


@pytest.mark.parametrize(("policy", "trained"), [("shrink", 0), ("fallback", 4)])
async def test_at_the_bound_the_policy_decides(policy: str, trained: int):
    made = setup(keeps=lambda index: False, rollout_batch_size=4, max_sampling_rounds=2, on_sampling_exhausted=policy)
    assert len(await made.collect(0)) == trained
    assert made.metric("groups_by_fallback") == trained


async def test_groups_that_cannot_be_trained_on_are_no_fallback():
    verdict = DynamicFilterOutput(keep=False, reason="nonfinite_reward")
    made = setup(
        keeps=lambda index: verdict, rollout_batch_size=4, max_sampling_rounds=1, on_sampling_exhausted="fallback"
    )
    assert await made.collect(0) == []


async def test_reasons_are_bounded_in_number_over_a_run():
    count = iter(range(1000))
    made = setup(
        keeps=lambda index: DynamicFilterOutput(keep=index % 2 == 0, reason=f"score {next(count)}"),
        rollout_batch_size=16, over_sampling_batch_size=40,
    )  # fmt: skip
    names: set[str] = set()
    for rollout_id in range(5):
        await made.collect(rollout_id)
        names |= {key for key in made.output.metrics if key.startswith("rollout/dynamic_filter/drop/")}
    assert len(names) <= 33
    assert "rollout/dynamic_filter/drop/other" in names


# A rollout function, at the boundary of the collector


async def takes_two(args: Any, rollout_id: int, data_source: Any, *, context: Any) -> list[Group]:
    groups = data_source.get_samples(3)
    await asyncio.gather(*(context.generate(group) for group in groups[:2]))
    return groups[:2]


async def brings_its_own(args: Any, rollout_id: int, data_source: Any) -> list[Group]:
    def sample() -> Sample:
        return Sample(
            tokens=[1, 2],
            response="x",
            response_length=1,
            rollout_log_probs=[-1.0],
            status=Status.COMPLETED,
            reward=0.5,
        )

    return [[sample(), sample()] for _ in range(3)]


def marks(args: Any, sample: Sample) -> None:
    sample.metadata["hooked"] = True


async def test_a_rollout_function_goes_through_hooks_rewards_and_the_filter():
    """slime 2061: a custom rollout function bypasses the filter and hooks."""
    made = setup(
        keeps=lambda index: index != 0, over_sampling_batch_size=None, rollout_function_path=f"{__name__}.takes_two",
        rollout_sample_hook_path=(f"{__name__}.marks",),
    )  # fmt: skip
    assert await made.collect(0) == [1, 2]
    assert made.judged == [0, 1, 2, 3]
    assert all(sample.metadata["hooked"] and sample.reward is not None for g in made.output.groups for sample in g)
    assert made.metric("groups_put_back") == 2  # of each call the third group, which is the next call's first
    assert made.metric("groups_surplus") == 1


async def test_groups_that_come_from_elsewhere_are_trained_on_and_their_surplus_is_counted():
    made = setup(over_sampling_batch_size=None, rollout_function_path=f"{__name__}.brings_its_own")
    assert await made.collect(0) == [-3, -2]
    assert made.metric("groups_surplus") == 1
    assert [sample.reward for group in made.output.groups for sample in group] == [0.5] * 4


async def test_a_filter_sees_responses_that_fanned_out_as_lists_and_training_sees_them_flat():
    """slime 2374: filter sees a group whose members fanned out into lists."""
    seen: list[Any] = []

    async def fans_out(args: Any, rollout_id: int, data_source: Any, *, context: Any) -> Any:
        groups = data_source.get_samples(2)
        for group in groups:
            await context.generate(group)
            group[0] = [group[0], copy.deepcopy(group[0])]
        return groups

    made = setup(keeps=lambda index: True, over_sampling_batch_size=None)
    from rollout.custom.contracts import ROLLOUT
    from rollout.custom.rollout import RolloutFunction
    from samples.signatures import bind_function

    made.collector._function = RolloutFunction(bind_function("m.f", fans_out, ROLLOUT), None, made.source)
    made.collector._screen._filter = lambda args, group: (
        seen.append([isinstance(member, list) for member in group]) or filters.check_reward_nonzero_std(args, group)
    )
    made.collector._screen._args = RewardConfig()
    await made.collect(0)
    assert seen == [[True, False]] * 2
    assert [len(group) for group in made.output.groups] == [3, 3]
    assert all(isinstance(sample, Sample) for group in made.output.groups for sample in group)
