import asyncio
import contextvars
import functools
import json
import sys
import threading

import pytest

from rollout.config import RewardConfig
from rollout.rewards import RewardError, build_reward
from rollout.rewards.custom import CustomReward
from samples.errors import InputError
from samples.sample import Sample


def custom(function, *, timeout=30.0, concurrency=8, reward_key=None, args=None):
    return CustomReward(function, "my_rm.score", args, timeout=timeout, concurrency=concurrency, reward_key=reward_key)


class AsyncObject:
    async def __call__(self, args, sample):
        return 3.0


async def test_sync_async_partial_object_and_wrapped_functions_are_called():
    async def answer(args, sample, **kwargs):
        return args + sample.index

    def scaled(args, sample, factor):
        return factor * sample.index

    sample = Sample(index=2)
    assert await custom(answer, args=10).score(sample) == 12.0
    assert await custom(functools.partial(answer), args=10).score(sample) == 12.0
    assert await custom(lambda args, sample: answer(args, sample), args=10).score(sample) == 12.0
    assert await custom(functools.partial(scaled, factor=5)).score(sample) == 10.0
    assert await custom(AsyncObject()).score(sample) == 3.0
    assert sample.reward == 3.0


async def test_group_rewards_keep_the_order_of_the_group():
    async def later_first(args, sample):
        await asyncio.sleep(0.001 * (5 - sample.index))
        return sample.index

    assert await custom(later_first).score_group([Sample(index=i) for i in range(5)]) == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_sync_function_does_not_block_the_event_loop_and_sees_the_callers_context():
    rollout = contextvars.ContextVar("rollout")
    rollout.set(4)
    release = threading.Event()

    def waits(args, sample):
        assert release.wait(30)
        return rollout.get()

    scoring = asyncio.ensure_future(custom(waits).score(Sample(index=0)))
    await asyncio.sleep(0.01)  # runs only because the loop is free
    assert not scoring.done()
    release.set()
    assert await scoring == 4.0


async def test_calls_under_way_are_bounded_by_the_concurrency():
    running, most = 0, 0

    async def counted(args, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 0

    await custom(counted, concurrency=3).score_group([Sample(index=i) for i in range(20)])
    assert most == 3


async def test_threads_are_reused_and_bounded_by_the_concurrency():
    seen = set()

    def note(args, sample):
        seen.add(threading.get_ident())
        return 0

    reward = custom(note, concurrency=2)
    for _ in range(10):
        await reward.score_group([Sample(index=i) for i in range(4)])
    assert len(seen) <= 2


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_exception_names_function_sample_and_place_and_keeps_its_cause(kind):
    def divides(args, sample):
        return 1 / 0

    async def divides_async(args, sample):
        return 1 / 0

    with pytest.raises(
        RewardError, match=r"my_rm.score raised ZeroDivisionError for sample 5: .*test_rewards_custom"
    ) as raised:
        await custom(divides if kind == "sync" else divides_async).score(Sample(index=5))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert isinstance(raised.value, InputError)


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), TimeoutError("own"), asyncio.CancelledError()])
async def test_exceptions_that_steer_the_interpreter_are_only_errors_of_the_function(error):
    def raises(args, sample):
        raise error

    async def raises_async(args, sample):
        raise error

    with pytest.raises(RewardError, match="sample 5"):
        await custom(raises).score(Sample(index=5))
    if not isinstance(error, SystemExit):  # raised on the loop itself it ends the program, as anywhere in asyncio
        with pytest.raises(RewardError, match="sample 5"):
            await custom(raises_async).score(Sample(index=5))


async def test_one_failure_in_a_group_cancels_the_others_and_surfaces():
    cancelled = []

    async def one_fails(args, sample):
        if sample.index == 1:
            raise OSError("disk gone")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(sample.index)
            raise

    with pytest.raises(RewardError, match="OSError for sample 1: disk gone") as raised:
        await custom(one_fails).score_group([Sample(index=i) for i in range(3)])
    assert isinstance(raised.value.__cause__, OSError)
    await asyncio.sleep(0)
    assert sorted(cancelled) == [0, 2]


async def test_bad_values_name_the_function_and_the_sample():
    with pytest.raises(InputError, match=r"my_rm.score returned None \(NoneType\) for sample 9"):
        await custom(lambda args, sample: None).score(Sample(index=9))
    assert await custom(lambda args, sample: {"acc": 1}, reward_key="acc").score(Sample(index=9)) == {"acc": 1.0}


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_call_past_the_time_limit_is_an_error_and_the_next_one_still_runs(kind):
    release = threading.Event()

    def slow(args, sample):
        if sample.index == 0:
            release.wait()
        return 1

    async def slow_async(args, sample):
        if sample.index == 0:
            await asyncio.sleep(3600)
        return 1

    reward = custom(slow if kind == "sync" else slow_async, timeout=0.05, concurrency=1)
    with pytest.raises(RewardError, match=r"longer than --rm-timeout 0.05 s for sample 0"):
        await reward.score(Sample(index=0))
    if kind == "async":
        assert await reward.score(Sample(index=1)) == 1.0
    release.set()


@pytest.mark.parametrize("kind", ["sync", "async", "stubborn"])
async def test_closing_ends_pending_calls_and_refuses_new_ones(kind, monkeypatch):
    monkeypatch.setattr("rollout.rewards.base.CLOSE_SECONDS", 0.05)
    release = threading.Event()

    def slow(args, sample):
        release.wait()
        return 1

    async def slow_async(args, sample):
        await asyncio.sleep(3600)

    async def stubborn(args, sample):
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    reward = custom({"sync": slow, "async": slow_async, "stubborn": stubborn}[kind], concurrency=2)
    waiting = [asyncio.ensure_future(reward.score(Sample(index=i))) for i in range(4)]
    await asyncio.sleep(0.02)
    await reward.close()
    await reward.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == [
        f"--custom-rm-path my_rm.score: closed before sample {i} was scored" for i in range(4)
    ]
    with pytest.raises(RewardError, match="after the reward was closed"):
        await reward.score(Sample(index=4))
    release.set()


async def test_cancelling_the_caller_is_not_taken_for_a_close():
    started = asyncio.Event()

    async def slow(args, sample):
        started.set()
        await asyncio.sleep(3600)

    scoring = asyncio.ensure_future(custom(slow).score(Sample(index=0)))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


@pytest.mark.parametrize(
    "function", [42, lambda: 1, lambda args: 1, lambda args, sample, must: 1, lambda *, args, sample: 1]
)
def test_a_function_that_cannot_take_args_and_sample_is_refused_when_loaded(function):
    with pytest.raises(InputError, match=r"--custom-rm-path my_rm.score.*fn\(args, sample\)"):
        custom(function)


@pytest.mark.parametrize(
    "function", [lambda *a: 1, lambda args, sample, /: 1, lambda args, sample, extra=0, **k: 1, max]
)
def test_a_function_that_can_take_them_is_accepted(function):
    custom(function)


async def test_a_function_is_loaded_by_path_from_the_user_code_dir(tmp_path):
    (tmp_path / "house_rm.py").write_text("def longer(args, sample):\n    return args['unit'] * len(sample.response)\n")
    config = RewardConfig(custom_rm_path="house_rm.longer", user_code_dir=str(tmp_path))
    reward = build_reward(config, {"unit": 0.5})
    assert await reward.score(Sample(response="four", index=0)) == 2.0
    await reward.close()


def _exits(args, sample):
    sys.exit("no")


async def _exits_on_the_loop(args, sample):
    _exits(args, sample)


def _interrupts(args, sample):
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", [_exits, _exits_on_the_loop, _interrupts])
async def test_a_function_that_ends_the_process_is_an_error_with_its_own_file_and_line(function):
    kind = "KeyboardInterrupt" if function is _interrupts else "SystemExit"
    with pytest.raises(RewardError, match=rf"raised {kind} for sample 3.*test_rewards_custom\.py, line \d+\)"):
        await custom(function).score(Sample(index=3))


async def test_an_error_deep_in_a_library_is_placed_where_the_users_code_called_it():
    with pytest.raises(RewardError, match=r"JSONDecodeError.*test_rewards_custom\.py, line \d+\)"):
        await custom(lambda args, sample: json.loads("{")).score(Sample(index=0))
