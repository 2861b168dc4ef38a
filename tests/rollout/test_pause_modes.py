"""What becomes of running requests when the embedded engine gets new weights, and what is known of it afterwards."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rollout.engines.errors import EngineError
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from tests.rollout.test_torch_engine_updates import update

COUNT = 100
GREEDY = SamplingParams(COUNT, temperature=0.0, ignore_eos=True)
REQUESTS = [GenerateRequest(str(i), (1 + i, 2, 3), GREEDY, 0, 0, i) for i in range(3)]
DECODERS = pytest.mark.parametrize("decoder", ["dense", "general"])


async def begun(engine, requests=REQUESTS, tokens=1):
    """Tasks of requests that have at least so many tokens each."""
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    async with asyncio.timeout(60):
        while (await engine.health()).extra["generated_tokens"] < tokens * len(requests):
            await asyncio.sleep(0)
    return tasks


def with_old_cache(old, new, prompt, first, count):
    """Greedy tokens of ``new`` that see keys and values of ``old`` for the prompt and all of ``first`` but the last."""
    from transformers import DynamicCache

    ids = list(first)
    with torch.no_grad():
        cache = DynamicCache(config=old.reference.config)
        old.reference(torch.tensor([prompt + first[:-1]]), past_key_values=cache, use_cache=True)
        while len(ids) < len(first) + count:
            logits = new.reference(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(first) :]


@DECODERS
async def test_in_place_goes_on_with_the_keys_and_values_that_are_there(tiny_model, serve, decoder):
    old, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    async with serve(old, decoder=decoder, pause_mode=PauseMode.IN_PLACE) as engine:
        tasks = await begun(engine)
        await engine.begin_update(1)
        await engine.update_weights(new.weights())
        late = asyncio.ensure_future(engine.generate(GenerateRequest("late", (7, 8), GREEDY, 0, 0, 9)))
        prefilled = (await engine.health()).extra["prefill_tokens"]
        await engine.commit_update(1)
        results = await asyncio.gather(*tasks)
        fresh = await late
        health = await engine.health()
    for request, result in zip(REQUESTS, results, strict=True):
        prompt = list(request.input_ids)
        (first, before), (second, after) = result.spans
        assert (first, second, before + after) == (-1, 1, COUNT)
        assert before > 0
        assert result.output_ids[:before] == old.greedy(prompt, before)
        assert result.output_ids[before:] == with_old_cache(old, new, prompt, result.output_ids[:before], after)
        assert result.weight_version == -1
    assert fresh.spans == ((1, COUNT),)
    assert fresh.output_ids == new.greedy([7, 8], COUNT)  # nobody's old keys and values
    assert health.extra["prefill_tokens"] == prefilled + 2
    assert health.counts == {"old_cache_tokens": sum(result.spans[1][1] for result in results)}


@DECODERS
async def test_log_probs_of_each_stretch_are_those_of_the_weights_that_drew_it(tiny_model, serve, decoder):
    old, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    async with serve(old, decoder=decoder, pause_mode=PauseMode.RETRACT) as engine:
        tasks = await begun(engine, REQUESTS[:1], tokens=3)
        await update(engine, 4, new.weights())
        (result,) = await asyncio.gather(*tasks)
    (_, before), (version, _) = result.spans
    assert version == 4
    ids = [*REQUESTS[0].input_ids, *result.output_ids]
    for model, places in ((old, range(before)), (new, range(before, COUNT))):
        expected = model.log_probs(ids)
        for place in places:
            assert result.log_probs[place] == pytest.approx(float(expected[place + 2, ids[place + 3]]), abs=1e-4)


async def test_abort_answers_what_has_tokens_and_keeps_what_has_none(tiny_model, serve):
    old, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    async with serve(old, pause_mode=PauseMode.ABORT, max_running_requests=2) as engine:
        tasks = await begun(engine, REQUESTS[:2])
        waiting = asyncio.ensure_future(engine.generate(REQUESTS[2]))
        await asyncio.sleep(0)
        await engine.begin_update(1)
        for request, result in zip(REQUESTS, await asyncio.gather(*tasks), strict=False):
            assert result.finish_reason is FinishReason.ABORT
            assert 0 < len(result.output_ids) < COUNT
            assert result.output_ids == old.greedy(list(request.input_ids), len(result.output_ids))
            assert result.spans == ((-1, len(result.output_ids)),)
        assert not waiting.done()
        await engine.update_weights(new.weights())
        await engine.commit_update(1)
        result = await waiting
    assert (result.output_ids, result.spans) == (new.greedy(list(REQUESTS[2].input_ids), COUNT), ((1, COUNT),))


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_version_that_was_never_whole_is_in_no_response(tiny_model, serve, mode):
    model, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    half = dict(list(new.weights().items())[:4])
    async with serve(model, pause_mode=mode) as engine:
        await update(engine, 1, model.weights())
        tasks = await begun(engine)
        await engine.begin_update(2)
        await engine.update_weights(half)
        await engine.fail_update("the trainer died")
        done = (await engine.health()).extra["generated_tokens"]
        with pytest.raises(EngineError, match="the trainer died; send a whole update"):
            await engine.generate(GenerateRequest("x", (1,), GREEDY, 0, 0, 0))
        await update(engine, 3, model.weights())
        results = await asyncio.gather(*tasks)
    assert sum(result.spans[0][1] for result in results) == done
    assert all([version for version, _ in result.spans] == [1, 3] for result in results)
    for request, result in zip(REQUESTS, results, strict=True):  # the same weights again: as if nothing had been
        assert result.output_ids == model.greedy(list(request.input_ids), COUNT)


async def test_in_place_drops_a_cache_that_may_hold_nan(tiny_model, serve):
    model = tiny_model("qwen3")
    tensors = model.weights()
    async with serve(model, pause_mode=PauseMode.IN_PLACE, max_running_requests=4) as engine:
        await update(engine, 1, {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()})
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(REQUESTS[0])
        await update(engine, 2, tensors)
        result = await engine.generate(REQUESTS[1])
    assert result.output_ids == model.greedy(list(REQUESTS[1].input_ids), COUNT)


async def test_rows_that_move_keep_the_record_of_their_cache(tiny_model, serve):
    old, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    short = SamplingParams(40, temperature=0.0, ignore_eos=True)
    requests = [GenerateRequest(f"s{i}", (1 + i, 2), short, 0, 0, i) for i in range(6)] + REQUESTS
    async with serve(old, pause_mode=PauseMode.IN_PLACE) as engine:
        tasks = await begun(engine, requests)
        await update(engine, 1, new.weights())
        results = await asyncio.gather(*tasks)
        health = await engine.health()
    assert health.counts["old_cache_tokens"] == sum(tokens for result in results for _, tokens in result.spans[1:])
    assert all(sum(tokens for _, tokens in result.spans) == len(result.output_ids) for result in results)
