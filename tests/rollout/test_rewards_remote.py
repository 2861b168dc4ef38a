import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollout.config import RewardConfig
from rollout.rewards import RewardError, build_reward
from rollout.rewards.remote import backoff_seconds, is_loopback
from samples.errors import InputError
from samples.sample import Sample, Status

SAMPLE = Sample(
    prompt="2+2=",
    response="4",
    label="4",
    index=8,
    group_index=1,
    source="sums",
    metadata={"difficulty": 1},
    status=Status.COMPLETED,
)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("rollout.rewards.remote.FIRST_BACKOFF_SECONDS", 0.001)


@asynccontextmanager
async def service(handler, **settings):
    """A real reward service on loopback, and the reward that asks it."""
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = RewardConfig(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/score", **settings)
    reward = build_reward(config, None)
    try:
        yield reward
    finally:
        await reward.close()
        await runner.cleanup()


async def test_the_service_gets_the_sample_as_json_and_its_number_is_the_reward():
    seen = []

    async def handler(request):
        seen.append(await request.json())
        return web.json_response(0.25)

    async with service(handler) as reward:
        assert await reward.score(SAMPLE) == 0.25
    assert seen == [
        {
            "prompt": "2+2=",
            "response": "4",
            "label": "4",
            "metadata": {"difficulty": 1},
            "source": "sums",
            "status": "completed",
            "index": 8,
            "group_index": 1,
        }
    ]


async def test_an_object_is_read_through_the_reward_key():
    async def handler(request):
        return web.json_response({"score": 1, "note": "fine"})

    async with service(handler, reward_key="score") as reward:
        assert await reward.score(SAMPLE) == {"score": 1.0, "note": "fine"}
    async with service(handler) as reward:
        with pytest.raises(InputError, match=r"sample 8, with the keys 'score', 'note'"):
            await reward.score(SAMPLE)


async def test_statuses_from_500_are_retried_until_the_service_answers():
    asked = 0

    async def handler(request):
        nonlocal asked
        asked += 1
        return web.json_response(1.0) if asked == 3 else web.Response(status=503, text="warming up")

    async with service(handler, rm_retries=2) as reward:
        assert await reward.score(SAMPLE) == 1.0
        assert reward.counters() == {"retries": 2}


async def test_a_service_that_keeps_failing_is_an_error_with_its_own_words():
    async def handler(request):
        return web.Response(status=500, text="CUDA out of memory on judge 3")

    async with service(handler, rm_retries=1) as reward:
        with pytest.raises(RewardError, match=r"sample 8 in 2 attempts .*status 500 .*CUDA out of memory on judge 3"):
            await reward.score(SAMPLE)


@pytest.mark.parametrize("status", [307, 400, 404, 429])
async def test_other_statuses_are_final_and_show_the_services_words(status):
    asked = 0

    async def handler(request):
        nonlocal asked
        asked += 1
        return web.Response(status=status, text="label must be a list", headers={"Location": "/elsewhere"})

    async with service(handler, rm_retries=5) as reward:
        with pytest.raises(RewardError, match=rf"refused sample 8 with status {status} .*label must be a list"):
            await reward.score(SAMPLE)
    assert asked == 1


async def test_a_service_that_hangs_runs_into_the_time_limit_of_each_attempt():
    asked = 0

    async def handler(request):
        nonlocal asked
        asked += 1
        await asyncio.sleep(3600)

    async with service(handler, rm_timeout=0.05, rm_retries=1) as reward:
        with pytest.raises(RewardError, match=r"in 2 attempts .*no answer within --rm-timeout 0.05 s"):
            await reward.score(SAMPLE)
        assert reward.counters() == {"timeouts": 2, "retries": 1}
    assert asked == 2


async def test_nobody_listening_is_an_error_after_the_retries(unused_tcp_port):
    config = RewardConfig(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{unused_tcp_port}/", rm_retries=1)
    reward = build_reward(config, None)
    with pytest.raises(RewardError, match=r"in 2 attempts .*ClientConnectorError"):
        await reward.score(SAMPLE)
    await reward.close()


async def test_a_connection_cut_in_the_middle_is_retried():
    asked = 0

    async def handler(request):
        nonlocal asked
        asked += 1
        if asked == 1:
            request.transport.abort()
        return web.json_response(1.0)

    async with service(handler) as reward:
        assert await reward.score(SAMPLE) == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [("<html>", "not JSON: <html>"), ("", r"not JSON: \(empty\)"), ("NaN", "nan"), ("null", "None"), ('"1"', "'1'")],
)
async def test_an_answer_that_is_no_reward_is_refused(body, message):
    async def handler(request):
        return web.Response(text=body)

    async with service(handler) as reward:
        with pytest.raises(InputError, match=rf"sample 8.*{message}|{message}.*sample 8"):
            await reward.score(SAMPLE)


async def test_an_endless_answer_is_cut_off():
    async def handler(request):
        return web.Response(text="1" * (1 << 21))

    async with service(handler) as reward:
        with pytest.raises(RewardError, match="longer than"):
            await reward.score(SAMPLE)


async def test_requests_under_way_are_bounded():
    running, most = 0, 0

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return web.json_response(1.0)

    async with service(handler, rm_concurrency=4) as reward:
        assert await reward.score_group([Sample(index=i) for i in range(24)]) == [1.0] * 24
    assert most == 4


async def test_closing_cancels_what_waits_for_a_slow_service():
    started = asyncio.Event()

    async def handler(request):
        started.set()
        await asyncio.sleep(3600)

    async with service(handler, rm_concurrency=1) as reward:
        waiting = [asyncio.ensure_future(reward.score(Sample(index=i))) for i in range(3)]
        await started.wait()
        await reward.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, RewardError) and "closed before" in str(outcome) for outcome in outcomes)


async def test_a_sample_that_is_not_json_is_named():
    async def handler(request):
        return web.json_response(1.0)

    async with service(handler) as reward:
        with pytest.raises(InputError, match="sample 3 cannot be sent as JSON"):
            await reward.score(Sample(index=3, metadata={"when": object()}))


async def test_a_loopback_service_is_reached_past_the_proxies_of_the_environment(monkeypatch, unused_tcp_port):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.delenv("no_proxy", raising=False)

    async def handler(request):
        return web.json_response(1.0)

    async with service(handler) as reward:
        assert await reward.score(SAMPLE) == 1.0


def test_loopback_addresses_are_told_from_others():
    for host in ("localhost", "127.0.0.1", "127.8.0.1", "[::1]", "a.localhost"):
        assert is_loopback(f"http://{host}:8000/rm")
    for host in ("10.0.0.1", "example.org", "[2001:db8::1]", "localhost.example.org"):
        assert not is_loopback(f"http://{host}:8000/rm")


def test_waits_between_attempts_grow_and_stay_bounded(monkeypatch):
    monkeypatch.setattr("rollout.rewards.remote.FIRST_BACKOFF_SECONDS", 0.5)
    for failures, longest in [(1, 0.5), (2, 1.0), (3, 2.0), (10, 10.0), (10_000, 10.0)]:
        assert longest / 2 <= backoff_seconds(failures) <= longest


@pytest.mark.parametrize(
    "url", [None, "", "localhost:8000", "ftp://host/x", "http://", "http://host:port/", "http://[::1"]
)
def test_an_unusable_address_is_refused_at_start(url):
    with pytest.raises(InputError, match="--rm-url"):
        build_reward(RewardConfig(rm_type="remote_rm", rm_url=url), None)


async def test_an_answer_nested_too_deep_is_a_bad_answer():
    async def handler(request):
        return web.Response(text="[" * 200_000)

    async with service(handler) as reward:
        with pytest.raises(RewardError, match=r"answered sample 8 with JSON that is nested too deep: \[\["):
            await reward.score(SAMPLE)
