"""Requests join, leave, are aborted and cancelled; nobody's tokens depend on who else is there."""

import asyncio
import random
import threading

import pytest

from rollout.engines.errors import EngineError
from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from samples.errors import InputError

PARAMS = (
    SamplingParams(4),
    SamplingParams(12, temperature=0.8),
    SamplingParams(3, temperature=1.3, top_p=0.9),
    SamplingParams(8, top_k=5, ignore_eos=True),
    SamplingParams(6, temperature=0.0),
    SamplingParams(9, stop=("a", "Q7")),
)


def make_requests(count: int, seed: int = 0) -> list[GenerateRequest]:
    """Different lengths and parameters; every fourth shares its prompt with the one before."""
    draw = random.Random(seed)
    made: list[GenerateRequest] = []
    for index in range(count):
        prompt = tuple(draw.randrange(1, 90) for _ in range(draw.randrange(1, 30)))
        if index % 4 == 3:
            prompt = made[-1].input_ids
        made.append(GenerateRequest(str(index), prompt, draw.choice(PARAMS), seed, rollout_id=5, sample_index=index))
    return made


LONG = GenerateRequest("long", (1,), SamplingParams(200, ignore_eos=True), 0, 0, 0)


async def alone(engine, requests):
    return [await engine.generate(request) for request in requests]


async def test_a_thousand_requests_at_random_times_with_aborts_and_cancellations(tiny_model, serve):
    requests = make_requests(1000)
    draw = random.Random(1)
    fates = [draw.choices(["left alone", "aborted", "cancelled"], (6, 2, 2))[0] for _ in requests]
    answers: dict[str, list] = {request.request_id: [] for request in requests}

    model = tiny_model("qwen3", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
    async with serve(model, max_running_requests=48) as engine:
        expected = {result.request_id: result for result in await alone(engine, requests)}

        async def live(request: GenerateRequest, fate: str) -> None:
            await asyncio.sleep(draw.random() * 0.5)
            task = asyncio.ensure_future(engine.generate(request))
            if fate != "left alone":
                await asyncio.sleep(draw.choice((0.0, draw.random() * 0.02)))
                if fate == "aborted":
                    await engine.abort(request.request_id)
                else:
                    task.cancel()
            try:
                answers[request.request_id].append(await task)
            except asyncio.CancelledError:
                answers[request.request_id].append(None)

        await asyncio.gather(*(live(request, fate) for request, fate in zip(requests, fates, strict=True)))
        health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)
    for request, fate in zip(requests, fates, strict=True):
        (answer,) = answers[request.request_id]
        full = expected[request.request_id]
        if answer is None:
            assert fate == "cancelled"
        elif answer.finish_reason is FinishReason.ABORT:
            assert fate == "aborted"
            assert answer.output_ids == full.output_ids[: len(answer.output_ids)]
            assert len(answer.log_probs) == len(answer.output_ids) < request.sampling.max_new_tokens
        else:
            assert (answer.output_ids, answer.text) == (full.output_ids, full.text)
            assert answer.finish_reason is full.finish_reason
            assert answer.log_probs == pytest.approx(full.log_probs, abs=1e-5)
            assert answer.kept_token_ids == full.kept_token_ids
    outcomes = [answers[r.request_id][0] for r in requests]
    assert sum(a is None for a in outcomes) > 20  # the fates did happen
    assert sum(a is not None and a.finish_reason is FinishReason.ABORT for a in outcomes) > 20


@pytest.mark.parametrize("decoder", ["dense", "general"])
async def test_late_arrival_joins_the_running_batch(tiny_model, serve, decoder):
    early, late = make_requests(2)
    early = GenerateRequest("early", early.input_ids, SamplingParams(200, ignore_eos=True), 0, 0, 0)
    async with serve(tiny_model("qwen3"), decoder=decoder) as engine:
        expected = await alone(engine, [early, late])
        running = asyncio.ensure_future(engine.generate(early))
        while not (await engine.health()).running:
            await asyncio.sleep(0)
        second = await engine.generate(late)
        assert not running.done()
        assert second.output_ids == expected[1].output_ids
        assert (await running).output_ids == expected[0].output_ids


async def test_same_wave_of_requests_gives_the_same_bits_every_time(tiny_model, serve):
    requests = make_requests(60)
    async with serve(tiny_model("qwen3"), max_running_requests=20) as engine:
        runs = [await asyncio.gather(*(engine.generate(request) for request in requests)) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


async def test_random_numbers_follow_seed_rollout_sample_and_position(tiny_model, serve):
    prompt = make_requests(1)[0].input_ids
    params = SamplingParams(24, temperature=2.0, ignore_eos=True)

    async def tokens(engine, prompt=prompt, params=params, seed=0, rollout=0, sample=0, first=0):
        return (await engine.generate(GenerateRequest("a", prompt, params, seed, rollout, sample, first))).output_ids

    async with serve(tiny_model("qwen3")) as engine:
        base = await tokens(engine)
        others = [await tokens(engine, seed=1), await tokens(engine, rollout=1), await tokens(engine, sample=1)]
        half = base[:10]
        rest = await tokens(engine, (*prompt, *half), SamplingParams(14, temperature=2.0, ignore_eos=True), first=10)
    assert all(other != base for other in others)
    assert half + rest == base


async def test_requests_wait_for_room_in_the_cache_and_none_is_starved(tiny_model, serve):
    requests = make_requests(40)
    async with serve(tiny_model("qwen3"), max_total_tokens=128) as engine:
        expected = await alone(engine, requests)
        together = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [r.output_ids for r in together] == [r.output_ids for r in expected]


async def test_request_that_can_never_be_served_is_refused_at_once(tiny_model, serve):
    def request(prompt=(1, 2), **sampling):
        return GenerateRequest("r7", prompt, SamplingParams(**({"max_new_tokens": 4} | sampling)), 0, 0, 0)

    async with serve(tiny_model("qwen3"), max_total_tokens=64) as engine:
        for bad, words in (
            (request(max_new_tokens=100), "r7: its 2 [+] 100 tokens can never fit the cache of 64"),
            (request(prompt=(1,) * 256), "leaves no room in a context of 256"),
            (request(prompt=()), "input_ids is empty"),
            (request(prompt=(1, 90)), "vocabulary has 90 tokens"),
            (request(temperature=float("nan")), "temperature nan"),
            (request(top_p=0.0), "top_p 0"),
            (request(top_k=0), "top_k 0"),
            (request(max_new_tokens=0), "max_new_tokens 0"),
            (request(min_new_tokens=9), "min_new_tokens 9"),
            (request(stop=("",)), "empty string"),
        ):
            with pytest.raises(InputError, match=words):
                await engine.generate(bad)


async def test_abort_of_all_answers_running_and_waiting_with_what_they_have(tiny_model, serve):
    params = SamplingParams(200, ignore_eos=True)
    requests = [GenerateRequest(str(i), (1 + i,), params, 0, 0, i) for i in range(8)]
    async with serve(tiny_model("qwen3"), max_running_requests=4) as engine:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while (await engine.health()).running < 4:
            await asyncio.sleep(0)
        await engine.abort()
        await engine.abort("unknown")
        results = await asyncio.gather(*tasks)
    assert {r.finish_reason for r in results} == {FinishReason.ABORT}
    assert all(r.output_ids for r in results[:4])
    assert all(r.output_ids == [] and r.text == "" for r in results[4:])


async def test_pause_holds_requests_and_resume_lets_them_go_on(tiny_model, serve):
    params = SamplingParams(120, ignore_eos=True)
    async with serve(tiny_model("qwen3")) as engine:
        expected = await engine.generate(GenerateRequest("a", (1, 2, 3), params, 0, 0, 0))
        task = asyncio.ensure_future(engine.generate(GenerateRequest("a", (1, 2, 3), params, 0, 0, 0)))
        while not (await engine.health()).running:
            await asyncio.sleep(0)
        await engine.pause()
        before = (await engine.health()).extra["generated_tokens"]
        queued = asyncio.ensure_future(engine.generate(GenerateRequest("b", (1, 2, 3), params, 0, 0, 0)))
        await asyncio.sleep(0.05)
        paused = await engine.health()
        assert paused.extra["generated_tokens"] == before
        assert (paused.running, paused.waiting, paused.detail) == (1, 1, "paused")
        await engine.resume()
        results = [await task, await queued]
        assert [r.output_ids for r in results] == [expected.output_ids] * 2


async def test_event_loop_runs_while_the_engine_decodes(tiny_model, serve):
    async with serve(tiny_model("qwen3")) as engine:
        task = asyncio.ensure_future(engine.generate(LONG))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns > 20


async def test_error_on_the_decoding_thread_reaches_everybody_with_its_cause(tiny_model, serve, monkeypatch):
    from rollout.engines.torch_engine.dense import DenseDecoder

    def step(self, tokens):
        raise MemoryError("no more")

    async with serve(tiny_model("qwen3")) as engine:
        monkeypatch.setattr(DenseDecoder, "step", step)
        requests = make_requests(3)
        results = await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)
        assert [type(r) for r in results] == [EngineError] * 3
        assert all(isinstance(r.__cause__, MemoryError) for r in results)
        with pytest.raises(EngineError, match="no more") as later:
            await engine.generate(requests[0])
        assert isinstance(later.value.__cause__, MemoryError)
        with pytest.raises(EngineError, match="no more"):
            await engine.pause()
        health = await engine.health()
        assert not health.alive
        assert "no more" in health.detail


async def test_stop_answers_what_runs_and_ends_the_thread(tiny_model, serve):
    async with serve(tiny_model("qwen3")) as engine:
        task = asyncio.ensure_future(engine.generate(LONG))
        await asyncio.sleep(0.01)
        await engine.stop()
        assert (await task).finish_reason is FinishReason.ABORT
        assert not any(thread.name == "rollout-decode" for thread in threading.enumerate())
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(make_requests(1)[0])
        await engine.stop()


async def test_two_requests_under_one_id_are_an_error(tiny_model, serve):
    async with serve(tiny_model("qwen3")) as engine:
        request = make_requests(1)[0]
        results = await asyncio.gather(engine.generate(request), engine.generate(request), return_exceptions=True)
    assert isinstance(results[1], InputError)
    assert results[0].output_ids
