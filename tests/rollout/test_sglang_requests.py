"""What goes to SGLang's servers and what is made of their answers; servers here are HTTP ones of this process."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from aiohttp import web

from accel import select_accelerator
from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import Description, GroupSpec, Machines, ModelSpec, WorkerType
from rollout.deploy.disaggregation import Ports
from rollout.deploy.layout import plan_layout
from rollout.deploy.router import router_command
from rollout.engines.errors import EngineError
from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from rollout.engines.sglang.command import ServerSettings, server_command, server_environment
from rollout.engines.sglang.http import HttpClient, Refusal, Unreachable
from rollout.engines.sglang.requests import check_tokens, limit_of, read_answer, request_body, sampling_seed
from samples.errors import InputError


async def test_a_refusal_is_told_once_in_the_servers_own_words(http_server, client):
    asked = []

    async def refuse(request):
        asked.append(await request.json())
        return web.json_response({"error": {"message": "top_k is too large"}}, status=400)

    url = await http_server(refuse)
    with pytest.raises(Refusal, match=r"status 400 Bad Request: top_k is too large$"):
        await client.post(f"{url}/generate", {"a": 1})
    assert asked == [{"a": 1}]
    assert client.retried == 0


async def test_a_connection_that_breaks_is_tried_again(http_server, client):
    asked = []

    async def break_twice(request):
        asked.append(1)
        if len(asked) < 3:
            request.transport.abort()
        return web.json_response({"ok": True})

    url = await http_server(break_twice)
    assert await client.post(f"{url}/generate", {}) == {"ok": True}
    assert client.retried == 2


async def test_a_routers_lost_connection_to_a_worker_is_tried_again(http_server, client):
    asked = []

    async def lose_once(request):
        asked.append(1)
        if len(asked) == 1:
            return web.Response(status=500, text="error sending request for url (http://127.0.0.1:1/generate)")
        return web.json_response({"ok": True})

    assert await client.post(f"{await http_server(lose_once)}/generate", {}) == {"ok": True}
    assert client.retried == 1


async def test_a_router_without_a_worker_is_tried_again_and_then_told(http_server, client):
    async def nobody(request):
        return web.json_response({"error": {"message": "no workers"}}, status=503)

    url = await http_server(nobody)
    with pytest.raises(Unreachable, match=r"status 503 .*: no workers \(4 tries\)$"):
        await client.post(f"{url}/generate", {})


async def test_a_server_that_is_not_there_and_one_that_is_too_slow_are_told(http_server, client):
    with pytest.raises(Unreachable, match=r"Cannot connect.* \(2 tries\)$"):
        await client.get("http://127.0.0.1:9/health", retries=1)

    let_go = asyncio.Event()

    async def slow(request):
        await let_go.wait()
        return web.Response()

    url = await http_server(slow)
    with pytest.raises(Unreachable, match=r"no answer within 0\.1 s \(1 try\)"):
        await client.get(f"{url}/x", timeout=0.1, retries=0)
    assert not await client.answers(f"{url}/health", timeout=0.1)
    let_go.set()


async def test_responses_that_are_waited_for_leave_the_connections_that_control_needs(http_server):
    answer, asked = asyncio.Event(), []

    async def handle(request):
        if request.path == "/generate":
            asked.append(request)
            await answer.wait()
        return web.json_response({})

    url = await http_server(handle)
    client = HttpClient(connections=4)
    # A health check that waited behind responses would have a server that is well started again.
    waiting = [asyncio.ensure_future(client.post(f"{url}/generate", {}, timeout=60, queues=True)) for _ in range(100)]
    while len(asked) < 4:
        await asyncio.sleep(0.01)
    assert await client.answers(f"{url}/health", timeout=5)
    assert await client.post(f"{url}/pause_generation", {}, timeout=5) == {}
    assert len(asked) == 4
    answer.set()
    assert len(await asyncio.gather(*waiting)) == 100
    await client.close()


SAMPLING = SamplingParams(max_new_tokens=8)
REQUEST = GenerateRequest("3-5", (4, 5, 6), SAMPLING, seed=1, rollout_id=3, sample_index=5)


def with_sampling(**values):
    return dataclasses.replace(REQUEST, sampling=dataclasses.replace(SAMPLING, **values))


def test_a_request_says_only_what_is_not_usual():
    body = request_body(REQUEST, "3-5#1", 8, 16)
    assert body == {
        "rid": "3-5#1",
        "input_ids": [4, 5, 6],
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 1.0,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "ignore_eos": False,
            "sampling_seed": sampling_seed(REQUEST),
        },
        "return_logprob": True,
    }


def test_stops_and_lengths_are_handed_on():
    request = with_sampling(stop=("\n",), stop_token_ids=(7,), ignore_eos=True, min_new_tokens=9)
    sampling = request_body(request, "r", 8, 16)["sampling_params"]
    assert (sampling["stop"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (["\n"], [7], True)
    assert sampling["min_new_tokens"] == 8


@pytest.mark.parametrize(
    ("values", "top_k"), [({"top_p": 0.9}, 16), ({"top_k": 4}, 4), ({"top_k": 40}, 16), ({"top_p": 0.5, "top_k": 3}, 3)]
)
def test_kept_ids_are_asked_for_wherever_top_p_or_top_k_is_on(values, top_k):
    body = request_body(with_sampling(**values), "r", 8, 16)
    assert body["return_sampling_mask"] is True
    assert body["sampling_params"]["top_k"] == top_k
    assert "return_sampling_mask" not in request_body(with_sampling(temperature=0.0, **values), "r", 8, 16)


def test_seeds_differ_between_samples_and_are_the_same_for_the_same_one():
    seeds = {
        sampling_seed(GenerateRequest("", (1,), SAMPLING, seed, rollout, sample))
        for seed in range(5)
        for rollout in range(-3, 5)
        for sample in range(50)
    }
    assert len(seeds) == 5 * 8 * 50
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(REQUEST) == sampling_seed(dataclasses.replace(REQUEST, request_id="other", input_ids=(9,)))


def test_a_prompt_that_leaves_no_room_and_ids_outside_the_vocabulary_are_refused():
    assert limit_of(REQUEST, 128) == 8
    assert limit_of(REQUEST, 5) == 2
    with pytest.raises(InputError, match="leaves no room in a context of 3"):
        limit_of(REQUEST, 3)
    with pytest.raises(InputError, match="the prompt is empty"):
        limit_of(dataclasses.replace(REQUEST, input_ids=()), 128)
    with pytest.raises(InputError, match="token id 6 is outside the vocabulary of 6"):
        check_tokens(REQUEST, 6)


def answer(**meta):
    return {
        "output_ids": [7, 1],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 1},
            "output_token_logprobs": [[-0.5, 7, None], [-0.25, 1, None]],
            "weight_version": "4",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
            **meta,
        },
    }


def test_an_answer_bears_the_version_of_its_first_token():
    result = read_answer(REQUEST, answer(), int, lambda ids: f"text of {ids}")
    assert result.output_ids == [7, 1]
    assert result.log_probs == [-0.5, -0.25]
    assert (result.finish_reason, result.weight_version) == (FinishReason.STOP, 3)
    assert result.spans == ((3, 1), (4, 1))
    assert result.text == "text of [7, 1]"
    assert result.kept_token_ids is None


def test_an_answer_that_lacks_log_probabilities_or_kept_ids_is_an_error():
    with pytest.raises(EngineError, match="answered 2 tokens with 1 log-probabilities"):
        read_answer(REQUEST, answer(output_token_logprobs=[[-0.5, 7, None]]), int, str)
    with pytest.raises(EngineError, match="has no 'output_token_sampling_mask'"):
        read_answer(with_sampling(top_p=0.9), answer(), int, str)
    kept = read_answer(with_sampling(top_p=0.9), answer(output_token_sampling_mask=[[7, 2], [1]]), int, str)
    assert kept.kept_token_ids == [[7, 2], [1]]


SETTINGS = ServerSettings(Path("/m"), torch.float32, 128, 64, 4096, False, 3, 2, 16)


def planned(group, **machines):
    model = ModelSpec(name="actor", server_groups=(group,) if isinstance(group, GroupSpec) else group)
    return plan_layout(Description(models=(model,), machines=Machines(**machines))).engines


def command(plan, config=None, **keywords):
    keywords = {"host": "127.0.0.1", "ports": Ports(30000, 30001)} | keywords
    accelerator = select_accelerator("cpu")
    return server_command(Path("/py"), plan, SETTINGS, config or SGLangConfig(), accelerator, **keywords)


def value_of(words, flag):
    return words[words.index(flag) + 1]


def test_the_command_line_of_a_server_follows_from_plan_settings_and_overrides():
    group = GroupSpec(num_gpus=2, num_gpus_per_engine=2, overrides={"context_length": 256, "chunked_prefill_size": 32})
    config = SGLangConfig(sglang_overrides=("context_length=200", "disable-radix-cache=true"))
    words = command(planned(group)[0], config)
    assert words[:3] == ["/py", "-m", "sglang.launch_server"]
    assert value_of(words, "--tp-size") == "2"
    assert value_of(words, "--load-format") == "dummy"
    assert value_of(words, "--context-length") == "256"  # the group's own wins over the run's
    assert value_of(words, "--chunked-prefill-size") == "32"
    assert "--disable-radix-cache" in words
    assert value_of(words, "--log-level") == "warning"
    assert "--log-requests" not in words
    too_few = GroupSpec(num_gpus=1, overrides={"context_length": 64})
    with pytest.raises(InputError, match="context_length 64 is less than the run needs, 128"):
        command(planned(too_few)[0])
    environment = server_environment(select_accelerator("cpu"), SETTINGS)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"


def test_an_engine_on_two_nodes_has_a_command_line_for_each():
    (plan,) = planned(GroupSpec(num_gpus=4, num_gpus_per_engine=4), num_gpus_per_node=2)
    words = [command(plan, node_rank=rank, group_host="fd00::1") for rank in (0, 1)]
    assert [value_of(line, "--node-rank") for line in words] == ["0", "1"]
    assert {value_of(line, "--nnodes") for line in words} == {"2"}
    assert {value_of(line, "--dist-init-addr") for line in words} == {"[fd00::1]:30001"}


def test_prefill_servers_have_a_bootstrap_port():
    groups = tuple(GroupSpec(num_gpus=1, worker_type=kind) for kind in (WorkerType.PREFILL, WorkerType.DECODE))
    prefill, decode = planned(groups)
    words = command(prefill, ports=Ports(30000, 30001, 30002))
    assert value_of(words, "--disaggregation-mode") == "prefill"
    assert value_of(words, "--disaggregation-bootstrap-port") == "30002"
    assert value_of(command(decode), "--disaggregation-mode") == "decode"


@pytest.mark.parametrize("text", ["tp_size=4", "--model-path=/x", "nothing", "=1"])
def test_overrides_of_what_the_run_decides_are_refused(text):
    with pytest.raises(InputError, match=r"^--sglang-overrides"):
        command(planned(GroupSpec(num_gpus=1))[0], SGLangConfig(sglang_overrides=(text,)))


def test_the_router_logs_warnings_unless_requests_are_asked_for():
    def words(**values):
        return router_command(
            Path("/py"), SGLangConfig(**values), host="h", port=1, prometheus_port=2, log_dir=Path("/logs")
        )

    assert value_of(words(), "--log-level") == "warn"
    assert value_of(words(), "--log-dir") == "/logs"
    assert value_of(words(router_log_requests=True), "--log-level") == "info"
    assert value_of(words(router_log_requests=True, router_log_level="debug"), "--log-level") == "debug"
