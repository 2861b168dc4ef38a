"""Servers, routers and neighbours that misbehave; those here are HTTP servers of this process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import web

from rollout.deploy import ports as ports_module
from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import read_description
from rollout.deploy.overrides import run_overrides
from rollout.deploy.ports import PortLease
from rollout.deploy.process import ServerProcess
from rollout.deploy.router import Router, Worker
from rollout.engines.errors import EngineError
from rollout.engines.protocol import GenerateRequest, SamplingParams
from rollout.engines.sglang.http import Refusal, Unreachable
from rollout.engines.sglang.requests import read_answer
from rollout.engines.sglang.server import SGLangServer
from rollout.engines.sglang.weights import DiskChannel
from samples.errors import InputError

REQUEST = GenerateRequest("3-5", (4, 5), SamplingParams(max_new_tokens=8), seed=1, rollout_id=3, sample_index=5)


def saying(text, content_type="application/json"):
    async def handler(request):
        return web.Response(text=text, content_type=content_type)

    return handler


@pytest.mark.parametrize("text", ['{"paths": {"/gen', "", "[1, 2", "\0"])
async def test_broken_json_is_an_error_of_the_servers(http_server, client, text):
    url = await http_server(saying(text))
    with pytest.raises(EngineError, match=r"GET http.*/x: .* no JSON"):
        await client.get(f"{url}/x")


async def test_an_answer_larger_than_any_is_not_kept(http_server, client, monkeypatch):
    monkeypatch.setattr("rollout.engines.sglang.http._MOST_BYTES", 1000, raising=False)
    url = await http_server(saying('"' + "x" * 5000 + '"'))
    with pytest.raises(EngineError, match="more than 1000 bytes"):
        await client.get(f"{url}/x")


async def test_a_redirection_is_not_followed(http_server, client):
    other = await http_server(saying('{"ok": true}'))

    async def elsewhere(request):
        raise web.HTTPFound(f"{other}/y")

    with pytest.raises(Refusal, match="status 302"):
        await client.get(f"{await http_server(elsewhere)}/x")


async def test_a_response_that_takes_longer_than_one_may_is_not_asked_for_again(http_server, client):
    asked = []

    async def hang(request):
        asked.append(request)
        await asyncio.sleep(5)

    url = await http_server(hang)
    with pytest.raises(EngineError, match=r"no answer within 0\.1 s") as told:
        await client.post(f"{url}/generate", {}, timeout=0.1, queues=True)
    assert len(asked) == 1
    assert not isinstance(told.value, Unreachable)


@pytest.mark.parametrize("text", ["{}", "[]", "null", "3", '"words"', '{"paths": 3}', '{"paths": {}, "version": 1}'])
async def test_a_server_that_answers_rubbish_is_named(http_server, client, text):
    server = SGLangServer("server a", await http_server(saying(text)), client, worker=Worker("http://x"))
    with pytest.raises(EngineError, match=r"server a.* without|/openapi\.json|/server_info"):
        await server.wait_ready(1.0)
    with pytest.raises(EngineError, match="weight_version"):
        await server.weight_version()
    with pytest.raises(EngineError, match="did not take new weights"):
        await server.update_from_disk(Path("/x"), "1")


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"workers": 3}', '{"workers": [3]}', '{"workers": [{"id": 1}]}', "words"]
)
async def test_what_is_no_router_is_told(http_server, client, tmp_path, text):
    url = await http_server(saying(text, "text/plain" if text == "words" else "application/json"))
    router = adopted(url, client, tmp_path)
    with pytest.raises(EngineError, match="/workers"):
        await router.start()


def adopted(url, client, log_dir):
    host, port = url.removeprefix("http://").split(":")
    config = SGLangConfig(sglang_router_ip=host, sglang_router_port=int(port))
    return Router("actor", config, client, PortLease(), python=Path(sys.executable), log_dir=log_dir)


async def test_a_router_with_servers_of_another_run_is_not_used(http_server, client, tmp_path):
    listed = {"workers": [{"id": "1", "url": "http://10.0.0.9:1", "is_healthy": True}]}

    async def handler(request):
        return web.json_response(listed)

    router = adopted(await http_server(handler), client, tmp_path)
    with pytest.raises(EngineError, match=r"--sglang-router-ip .*http://10\.0\.0\.9:1"):
        await router.start()
    router = adopted(await http_server(handler), client, tmp_path)
    await router.start(known=["http://10.0.0.9:1"])  # adopted servers may be there already


async def test_a_router_port_that_is_taken_is_refused_before_its_owner_gets_our_servers(http_server, client, tmp_path):
    port = int((await http_server(saying("{}"))).rsplit(":", 1)[1])
    for name in ("sglang_router_port", "router_prometheus_port"):
        config = SGLangConfig(**{name: port})
        router = Router("actor", config, client, PortLease(), python=Path(sys.executable), log_dir=tmp_path)
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {port}: .*taken"):
            await router.start()


async def test_a_process_that_has_ended_is_not_ready_though_another_answers_in_its_place(tmp_path):
    process = ServerProcess("router", [sys.executable, "-c", "raise SystemExit('no')"], tmp_path / "log")
    process.start()

    async def somebody_answers():
        while process.alive:
            await asyncio.sleep(0.01)
        return True

    with pytest.raises(EngineError, match="router ended with status 1"):
        await process.wait_ready(somebody_answers, 20, "--flag")


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": [[-0.5]]},
        {"output_token_logprobs": [3]},
        {"output_token_logprobs": [[None, 7, None]]},
        {"output_token_logprobs": [[float("nan"), 7, None]]},
        {"output_token_logprobs": [[0.5, 7, None]]},
        {"weight_versions": [{"version": "1", "start": 0, "end": "x"}]},
        {"weight_versions": [{"version": "1", "start": 0, "end": 9}]},
        {"weight_versions": [3]},
        {"finish_reason": "stop"},
        {"finish_reason": {"type": "tired"}},
    ],
)
def test_rubbish_in_an_answer_is_an_error_of_the_engines(changes):
    meta = {
        "output_token_logprobs": [[-0.5, 7, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
    }
    assert read_answer(REQUEST, {"output_ids": [7], "meta_info": meta}, int, str).output_ids == [7]
    with pytest.raises(EngineError, match="request 3-5: the server"):
        read_answer(REQUEST, {"output_ids": [7], "meta_info": meta | changes}, int, str)


@pytest.mark.parametrize("answer", [None, "words", [], {"output_ids": ["x"], "meta_info": {}}, {"output_ids": 3}])
def test_an_answer_of_another_form_is_an_error_of_the_engines(answer):
    with pytest.raises(EngineError, match="request 3-5: the server"):
        read_answer(REQUEST, answer, int, str)


def test_locks_of_ports_are_not_kept_in_a_directory_that_another_could_write_to(tmp_path, monkeypatch):
    monkeypatch.setattr(ports_module.tempfile, "gettempdir", lambda: str(tmp_path))
    place = tmp_path / f"accelrl-ports-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.symlink_to(elsewhere)
    with pytest.raises(EngineError, match=str(place)):
        PortLease().take()
    assert not list(elsewhere.iterdir())
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(EngineError, match=str(place)):
        PortLease().take()
    place.rmdir()
    place.write_text("")
    with pytest.raises(EngineError, match=str(place)):
        PortLease().take()
    place.unlink()
    lease = PortLease()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", lease.take()))
    lease.close()


@pytest.mark.parametrize(
    "text",
    [
        "tensor_parallel_size=2",
        "model=/x",
        "nccl-init-addr=h:1",
        "hos=0.0.0.0",
        "pp_size=2",
        "pipeline-parallel-size=2",
        "config=/x.yaml",
        "ssl_keyfile=/k",
        "grpc_mode=true",
        "disable_overlap_schedule=--host=0.0.0.0",
        "x y=3",
    ],
)
def test_overrides_reach_what_the_run_decides_under_no_other_name(text):
    with pytest.raises(InputError, match=r"^--sglang-overrides"):
        run_overrides(SGLangConfig(sglang_overrides=(text,)))


def test_a_description_that_unfolds_to_more_than_memory_holds_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]
    bomb = "\n  ".join(lines)
    file = tmp_path / "x.yaml"
    file.write_text(f"z: &z\n  {bomb}\nmodels: *z\n")
    with pytest.raises(InputError):
        read_description(file)
    file.write_text(
        "sglang:\n- name: a\n  server_groups:\n  - num_gpus: 1\n    overrides:\n      " + bomb.replace("\n", "\n    ")
    )
    with pytest.raises(InputError, match="overrides"):
        read_description(file)
    file.write_text("models:\n- name: a\n  server_groups:\n  - num_gpus: 1\n    overrides: &o\n      k: *o\n")
    with pytest.raises(InputError, match="overrides"):
        read_description(file)


async def test_files_of_an_update_that_failed_do_not_stay(tmp_path):
    (tmp_path / "model").mkdir()
    channel = DiskChannel(tmp_path / "written", tmp_path / "model")
    for _ in range(3):
        await channel.begin([])
    assert len(list((tmp_path / "written").iterdir())) == 1


async def test_servers_that_a_router_had_before_stay_there(http_server, client, tmp_path):
    listed = [{"id": "1", "url": "http://10.0.0.9:1", "is_healthy": True}]

    async def handler(request):
        if request.method == "POST":
            listed.append({"id": "2", "url": (await request.json())["url"], "is_healthy": True})
        if request.method == "DELETE":
            listed.remove(next(one for one in listed if one["id"] == request.path.rsplit("/", 1)[1]))
        return web.json_response({"workers": listed})

    router = adopted(await http_server(handler), client, tmp_path)
    await router.start(known=["http://10.0.0.9:1"])
    await router.register(Worker("http://10.0.0.9:1"))
    await router.register(Worker("http://10.0.0.8:1"))
    assert len(listed) == 2
    await router.stop()
    assert [one["url"] for one in listed] == ["http://10.0.0.9:1"]


async def test_a_server_that_hangs_does_not_hold_up_who_leaves_a_request(http_server, client, monkeypatch):
    asked = []
    monkeypatch.setattr("rollout.engines.sglang.server._FORGET_TIMEOUT", 0.05)

    async def hang(request):
        asked.append(request.path)
        await asyncio.sleep(5)

    server = SGLangServer("server a", await http_server(hang), client, worker=Worker("http://x"))
    with pytest.raises(Unreachable, match="1 try"):
        await server.forget("3-5#1#")
    assert asked == ["/abort_request"]


def test_a_log_that_cannot_be_written_is_told_with_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    process = ServerProcess("server a", [sys.executable, "-c", ""], tmp_path / "file" / "a.log")
    with pytest.raises(EngineError, match=r"server a: .*file.*--sglang-log-dir"):
        process.start()
