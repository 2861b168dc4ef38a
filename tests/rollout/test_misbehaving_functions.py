"""What a user's functions do that they should not: the run says so, and neither hangs nor loses a prompt."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from filters import DynamicFilterOutput, call_dynamic_filter
from hooks import SampleHookError
from rollout.collectors.base import CollectorState
from rollout.collectors.screening import Screen
from rollout.collectors.sync import SyncCollector
from rollout.collectors.tally import described
from rollout.config import RewardConfig, RolloutConfig
from rollout.custom.contracts import CONVERT, FILTER, REWARD_POST_PROCESS
from rollout.custom.generate import CustomGenerate
from rollout.engines.protocol import SamplingParams
from rollout.event_loop import EventLoopThread
from rollout.group import GroupRunner
from rollout.rewards.exact_match import ExactMatchReward
from rollout.testing import check_filter
from rollout.testing.engine import EchoEngine, EchoTokenizer, example_args, example_groups
from samples.errors import InputError, RunError
from samples.sample import Sample, Status
from samples.signatures import Contract, bind_function
from tests.rollout.async_cases import GROUP_SIZE, Chances, Process, TinySource, index_of
from tests.rollout.virtual_clock import run_virtually


def leaves(*_: Any) -> None:
    sys.exit(3)


async def leaves_later(*_: Any) -> None:
    sys.exit(3)


def runner(**settings: Any) -> GroupRunner:
    args = example_args(**settings)
    return GroupRunner(EchoEngine(), ExactMatchReward(), args, seed=0, max_context_len=64)


# Leaving the program: in a task, SystemExit would end the event loop, and whoever waits would wait for ever.


def test_a_hook_that_leaves_the_program_ends_the_run_with_its_name() -> None:
    hooks = runner(rollout_sample_hook_path=(f"{__name__}.leaves",))
    with pytest.raises(SampleHookError, match=r"test_misbehaving_functions.leaves failed on sample 0 .*SystemExit: 3"):
        asyncio.run(hooks.finish(example_groups()[0], rollout_id=0, group_index=0))


def test_a_filter_that_leaves_the_program_ends_the_run_with_its_name() -> None:
    with pytest.raises(InputError, match=r"--dynamic-sampling-filter-path mine.f failed on group 0: SystemExit: 3"):
        Screen(leaves, None, "mine.f").judge(example_groups(scored=True)[0], 0)


def test_a_generate_function_that_leaves_the_program_ends_the_run_with_its_name() -> None:
    function = bind_function("mine.g", leaves_later, Contract("--flag", ("args", "sample", "params"), (), ""))
    generate = CustomGenerate(function, None, EchoTokenizer())
    sample = example_groups(answered=False)[0][0]
    call = generate(EchoEngine(), sample, None, seed=0, max_context_len=64, evaluation=False)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"mine.g failed on sample 0 .*SystemExit: 3"):
        asyncio.run(call)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_the_event_loop_outlives_what_would_end_it(error: type[BaseException]) -> None:
    async def raises() -> None:
        raise error

    async def from_a_task_of_its_own() -> None:
        await asyncio.gather(raises(), asyncio.sleep(60))

    async def answer() -> int:
        return 7

    loop = EventLoopThread("test-loop")
    try:
        with pytest.raises(error):
            loop.run(from_a_task_of_its_own())
        assert loop.run(answer()) == 7
    finally:
        loop.close()


# Signatures and kinds, when they are loaded


@pytest.mark.parametrize("contract", [FILTER, REWARD_POST_PROCESS, CONVERT], ids=lambda contract: contract.flag)
def test_an_async_function_that_nobody_awaits_is_refused_when_it_is_loaded(contract: Contract) -> None:
    with pytest.raises(InputError, match=f"^{contract.flag} mine.f: is async, and nothing awaits it; write def "):
        bind_function("mine.f", leaves_later, contract)


def takes_a_group(group: Any) -> bool:
    return True


def test_a_filter_that_cannot_be_called_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(InputError, match=r"--dynamic-sampling-filter-path mine.f\(group: .*lacks group; it is called"):
        bind_function("mine.f", takes_a_group, FILTER)
    with pytest.raises(AssertionError, match="lacks group"):
        check_filter(takes_a_group)
    bind_function("mine.f", functools.partial(lambda least, args, group: True, 3), FILTER)


# Verdicts


def test_a_reason_is_text_whatever_the_filter_gives() -> None:
    verdict = call_dynamic_filter(lambda args, group: DynamicFilterOutput(False, 7), None, [])  # type: ignore[arg-type]
    assert verdict.reason == "7"


def test_a_message_names_a_few_reasons_however_many_there_are() -> None:
    assert described(Counter({"b": 1, "a": 2})) == "2 a, 1 b"
    told = described(Counter({f"reason {number}": 2 for number in range(1000)}))
    assert told.endswith("2 reason 7, 1984 for 992 other reasons")
    assert described(Counter()) == "none"


def test_a_filter_that_empties_its_group_empties_only_what_it_was_given() -> None:
    group = example_groups(scored=True)[0]
    assert Screen(lambda args, group: group.clear() or True, None, "mine.f").judge(group, 0).keep
    assert len(group) == 3


# Rewards that do not come from the reward function


def gives_nan(args: Any, sample: Sample) -> None:
    sample.reward = float("nan")


def gives_text(args: Any, sample: Sample) -> None:
    sample.reward = "good"  # type: ignore[assignment]


def gives_mapping(args: Any, sample: Sample) -> None:
    sample.reward = {"score": 1}


def adds_infinity(args: Any, sample: Sample) -> None:
    sample.reward_adjustment = float("inf")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (gives_nan, "a sample hook, or the function that generated it, returned nan .* for sample 0: .*finite"),
        (gives_text, "returned 'good' .* for sample 0: a reward is a number"),
        (gives_mapping, "returned a mapping for sample 0, with the keys 'score': say with --reward-key"),
        (adds_infinity, "reward_adjustment returned inf .* for sample 0: .*finite"),
    ],
)
def test_a_reward_that_a_hook_gives_is_held_to_the_rules_of_rewards(hook: Callable[..., Any], message: str) -> None:
    hooks = runner(rollout_sample_hook_path=(f"{__name__}.{hook.__name__}",))
    with pytest.raises(InputError, match=message):
        asyncio.run(hooks.finish(example_groups()[0], rollout_id=0))


def test_a_mapping_that_a_hook_gives_is_used_by_its_key() -> None:
    hooks = runner(rollout_sample_hook_path=(f"{__name__}.gives_mapping",), reward_key="score")
    group = example_groups()[0]
    asyncio.run(hooks.finish(group, rollout_id=0))
    assert [sample.reward_value("score") for sample in group] == [1.0, 1.0, 1.0]


# Aborts that nobody asked for


class AbortingRunner:
    """Every answer ends aborted, at once."""

    def __init__(self) -> None:
        self.answers = 0

    async def answer(self, group: Any, params: Any, *, rollout_id: int) -> None:
        self.answers += 1
        for sample in group:
            sample.status = Status.ABORTED

    async def stop(self) -> None: ...

    def go_on(self) -> None: ...


def config(**settings: Any) -> RolloutConfig:
    values = {"rollout_mode": "fully-async", "rollout_batch_size": 2, "n_samples_per_prompt": GROUP_SIZE}
    return RolloutConfig.model_validate(values | settings)


def process(settings: RolloutConfig, **more: Any) -> Process:
    return Process(random.Random(0), more.pop("chances", Chances()), settings, prompts=40, num_rollout=10, **more)


@pytest.mark.parametrize("partial", [False, True])
def test_answers_that_always_end_aborted_end_the_asynchronous_run_with_the_reason(partial: bool) -> None:
    async def run() -> None:
        run = process(config(partial_rollout=partial))
        run.collector._runner = aborting = AbortingRunner()  # type: ignore[assignment]
        with pytest.raises(RunError, match="came back aborted 21 times although nothing was told to stop"):
            await asyncio.wait_for(run.collector.collect(0), 60)
        assert aborting.answers < 200
        await run.collector.close()

    run_virtually(run())


async def test_answers_that_always_end_aborted_do_not_pass_for_the_end_of_the_prompts() -> None:
    async def abort(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        sample.status = Status.ABORTED
        return sample

    def collector(**settings: Any) -> SyncCollector:
        function = bind_function("mine.g", abort, Contract("--flag", ("args", "sample", "params"), (), ""))
        return SyncCollector(
            config(rollout_mode="sync", **settings),
            RewardConfig(),
            engine=EchoEngine(),
            source=TinySource(40),
            reward=ExactMatchReward(),
            dynamic_filter=None,
            seed=0,
            max_context_len=64,
            generate=CustomGenerate(function, SimpleNamespace(), EchoTokenizer()),
        )

    with pytest.raises(InputError, match=r"passed to training: 0 groups drawn in 20 rounds.*, 40 aborted"):
        await collector().collect(0)
    assert not (await collector(on_sampling_exhausted="shrink").collect(0)).ended


# What a checkpoint of the asynchronous collector holds


def test_a_checkpoint_has_the_prompt_of_a_group_that_failed_for_good_drawn_again() -> None:
    async def run() -> None:
        chances = Chances()
        run = process(config(max_group_retries=0), chances=chances)
        await run.update()
        trained = set(map(index_of, (await run.collector.collect(0)).groups))
        chances.fail = 1.0
        await asyncio.sleep(100)
        assert run.collector.places.totals.failed > 0
        state = await run.collector.state()
        await run.collector.close()
        again = process(config(), state=(state, 1, 1))
        waiting = {entry.index for entry in state.waiting}
        left = set(map(index_of, again.source.next_groups(40)))
        assert trained | waiting | left == set(range(40))
        assert len(trained) + len(waiting) + len(left) == 40
        assert again.collector.places.totals.failed == 0
        again.check()
        await again.collector.close()

    run_virtually(run())


def test_resumed_from_another_mode_nothing_is_dispatched_for_a_step_of_the_past() -> None:
    async def run() -> None:
        source = TinySource(40)
        source.next_groups(18)
        resumed = process(config(max_weight_staleness=3), state=(CollectorState(source.state_dict(), {}), 9, 9))
        await resumed.update()
        assert not resumed.collector.places.in_flight
        collecting = asyncio.ensure_future(resumed.collector.collect(9))
        await asyncio.sleep(0)
        flights = resumed.collector.places.in_flight.values()
        assert [flight.rollout_id for flight in flights] == [9, 9]  # the last step needs no more
        await collecting
        await resumed.collector.close()

    run_virtually(run())


# Cancellation that is nobody's, and functions that never return


async def cancels_itself(*_: Any) -> Any:
    raise asyncio.CancelledError


async def waits(*_: Any) -> None:
    await asyncio.sleep(60)


async def test_a_hook_that_raises_a_cancellation_is_named_like_any_other_that_fails() -> None:
    hooks = runner(rollout_sample_hook_path=(f"{__name__}.cancels_itself",))
    with pytest.raises(SampleHookError, match=r"cancels_itself failed on sample 0 .*CancelledError"):
        await hooks.finish(example_groups()[0], rollout_id=0)


async def test_a_hook_that_is_cancelled_by_the_run_is_no_failure() -> None:
    settings = {"rollout_sample_hook_path": (f"{__name__}.waits",), "rollout_sample_hook_on_error": "drop"}
    task = asyncio.ensure_future(runner(**settings).finish(example_groups()[0], rollout_id=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_generate_function_that_raises_a_cancellation_is_named() -> None:
    function = bind_function("mine.g", cancels_itself, Contract("--flag", ("args", "sample", "params"), (), ""))
    generate = CustomGenerate(function, None, EchoTokenizer())
    sample = example_groups(answered=False)[0][0]
    with pytest.raises(RunError, match=r"mine.g failed on sample 0 .*CancelledError"):
        await generate(EchoEngine(), sample, None, seed=0, max_context_len=64, evaluation=False)  # type: ignore[arg-type]


def test_a_function_that_never_returns_is_named_when_the_loop_is_to_be_closed() -> None:
    begun, end = threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        end.wait(60)

    loop = EventLoopThread("test-loop")
    blocked = threading.Thread(target=loop.run, args=(blocks(),), daemon=True)
    blocked.start()
    begun.wait(60)
    try:
        with pytest.raises(RunError, match=r"has not returned for 0.2 s: it is in .* line \d+"):
            loop.check_free(0.2)
    finally:
        end.set()
        blocked.join()
        loop.close()


async def test_responses_are_aborted_at_once_and_not_one_after_the_other() -> None:
    class Slow(EchoEngine):
        under_way = most = 0

        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.01)
            return await super().generate(request)

        async def abort(self, request_id: str | None = None) -> None:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1

    engine = Slow()
    group = example_groups(answered=False)[0]
    answering = GroupRunner(engine, ExactMatchReward(), example_args(), seed=0, max_context_len=64)
    task = asyncio.ensure_future(answering.answer(group, SamplingParams(max_new_tokens=2), rollout_id=0))
    await asyncio.sleep(0.001)
    await answering.stop()
    assert engine.most == 3
    await task
