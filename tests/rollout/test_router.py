"""The real router in front of light stand-in workers: what it logs and where, and how it pairs prefill with decode."""

from __future__ import annotations

import asyncio
import contextlib

from rollout.deploy.config import SGLangConfig
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.ports import PortLease
from rollout.deploy.router import Router, Worker
from rollout.engines.sglang.http import HttpClient
from tests.rollout.sglang_cases import MARKS
from tests.rollout.standin_workers import worker

pytestmark = MARKS


@contextlib.asynccontextmanager
async def running_router(log_dir, *, disaggregated=False, **settings):
    client, ports = HttpClient(connections=64), PortLease()
    router = Router(
        "actor",
        SGLangConfig(**settings),
        client,
        ports,
        python=sglang_python(None),
        log_dir=log_dir,
        disaggregated=disaggregated,
    )
    try:
        await router.start()
        yield router, client
    finally:
        await router.stop()
        ports.close()
        await client.close()


def request(number):
    return {"rid": f"r{number}", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}


def sizes(directory):
    return {path.relative_to(directory): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


async def test_a_thousand_requests_leave_no_line_in_the_routers_log_or_the_runs_own(tmp_path, capfd):
    async with worker() as one, worker() as two, running_router(tmp_path) as (router, client):
        await router.register(Worker(one.url))
        await router.register(Worker(two.url))
        before = sizes(tmp_path)
        capfd.readouterr()
        await asyncio.gather(*(client.post(f"{router.url}/generate", request(n), queues=True) for n in range(1000)))
        assert len(one.requests) + len(two.requests) == 1000
        assert sizes(tmp_path) == before
        assert capfd.readouterr() == ("", "")


async def test_requests_are_logged_when_asked_in_files_of_the_log_directory_alone(tmp_path, capfd):
    async with worker() as one, running_router(tmp_path, router_log_requests=True) as (router, client):
        await router.register(Worker(one.url))
        before = sum(sizes(tmp_path).values())
        capfd.readouterr()
        for number in range(20):
            await client.post(f"{router.url}/generate", request(number))
        assert capfd.readouterr() == ("", "")
    written = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(map(len, written.values())) > before
    assert any(text.count("/generate") >= 20 for text in written.values())
    assert all(path.name == "router-actor.log" or path.parent.name == "router-actor" for path in written)


async def test_the_metrics_port_is_the_one_that_was_asked_for(tmp_path):
    ports = PortLease()
    port = ports.take()
    async with running_router(tmp_path, router_prometheus_port=port) as (router, client), worker() as one:
        await router.register(Worker(one.url))
        await client.post(f"{router.url}/generate", request(0))
        text = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert "smg_" in text or "sgl_router" in text
    ports.close()


async def test_with_prefill_and_decode_apart_both_get_the_request_and_the_prefill_servers_bootstrap_port(tmp_path):
    async with (
        worker() as prefill,
        worker() as decode,
        running_router(tmp_path, disaggregated=True) as (router, client),
    ):
        await router.register(Worker(prefill.url, "prefill", 9123))
        await router.register(Worker(decode.url, "decode"))
        answer = await client.post(f"{router.url}/generate", request(0) | {"return_logprob": False})
        (asked,), (also,) = prefill.requests, decode.requests
        assert answer["meta_info"]["id"] == decode.url
        assert asked["bootstrap_port"] == also["bootstrap_port"] == 9123
        assert asked["bootstrap_room"] == also["bootstrap_room"]
        assert asked["bootstrap_host"] == also["bootstrap_host"] == "127.0.0.1"
        assert asked["input_ids"] == [1, 2]


async def test_a_router_that_dies_comes_back_with_prefill_and_decode_in_their_places(tmp_path):
    async with (
        worker() as prefill,
        worker() as decode,
        running_router(tmp_path, disaggregated=True) as (router, client),
    ):
        await router.register(Worker(prefill.url, "prefill", 9123))
        await router.register(Worker(decode.url, "decode"))
        assert router._process is not None
        await router._process.stop()
        assert await router.ensure()
        listed = await router._listed()
        assert {one["url"]: (one["worker_type"], one.get("bootstrap_port")) for one in listed} == {
            prefill.url: ("prefill", 9123),
            decode.url: ("decode", None),
        }
        await client.post(f"{router.url}/generate", request(1))
        assert prefill.requests[0]["bootstrap_room"] == decode.requests[0]["bootstrap_room"]
