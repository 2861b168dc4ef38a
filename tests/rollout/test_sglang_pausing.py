"""Real SGLang servers that get new weights while they generate, in every pause mode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout.engines.errors import EngineError
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from rollout.engines.sglang.adopting import check_adopted
from rollout.engines.sglang.weights import TensorChannel
from rollout.event_loop import EventLoopThread
from samples.errors import InputError
from tests.rollout.sglang_cases import MARKS, embedded, servers
from tests.rollout.test_sglang_servers import update, weights_of
from train.example import write_example

pytestmark = MARKS

LENGTH = 100
LONG = SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True)
PROMPTS = [(3, 4, 5, 13), (12, 11, 3, 13), (7, 7, 7, 13)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("example"), 0).hf_checkpoint


@pytest.fixture(scope="module")
def loop():
    loop = EventLoopThread("test-pausing")
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engines(model_dir, loop, tmp_path_factory):
    """Servers without a prefix cache, as in place needs them; and the embedded engine."""
    log_dir = tmp_path_factory.mktemp("servers")
    made = servers(model_dir, log_dir, load_weights=False, pause_generation_mode="in_place"), embedded(model_dir)
    for engine in made:
        loop.run(engine.start())
    yield made
    for engine in made:
        loop.run(engine.stop())


async def answers(engine, prompts, name, count=LENGTH):
    params = replace(LONG, max_new_tokens=count)
    requests = [GenerateRequest(f"{name}-{n}", tuple(ids), params, 0, 0, n) for n, ids in enumerate(prompts)]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def updated_midway(engine, version, weights, delay):
    task = asyncio.ensure_future(answers(engine, PROMPTS, f"long {version}"))
    await asyncio.sleep(delay)
    await update(engine, version, weights)
    return await task


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_response_under_way_ends_goes_on_anew_or_goes_on_in_place(mode, engines, model_dir, loop, monkeypatch):
    engine, reference = engines
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, pause_mode=mode))
    monkeypatch.setattr(engine._channel, "_flush", engine._flushes)
    base = 100 * (1 + list(PauseMode).index(mode))
    old, new = weights_of(model_dir, 1), weights_of(model_dir, 2)
    counted = loop.run(engine.health()).counts.get("old_cache_tokens", 0)
    old_cache = 0
    for attempt, delay in enumerate((0.4, 1.0, 0.2, 2.0, 0.1, 4.0)):
        before, after = base + 2 * attempt, base + 2 * attempt + 1
        loop.run(update(engine, before, old))
        results = loop.run(updated_midway(engine, after, new, delay))
        old_cache += sum(tokens for result in results for _, tokens in result.spans[1:])
        if all(len(result.output_ids) > 0 and result.spans[0] != (before, LENGTH) for result in results):
            break  # else the update met them before their first token, or after their last
    loop.run(update(reference, before, old))
    first = loop.run(answers(reference, PROMPTS, "first"))
    loop.run(update(reference, after, new))
    for prompt, result, expected in zip(PROMPTS, results, first, strict=True):
        stretch = result.spans[0][1]
        assert result.spans[0] == (before, stretch)
        assert 0 < stretch < LENGTH
        assert result.output_ids[:stretch] == expected.output_ids[:stretch]
        if mode is PauseMode.ABORT:
            assert result.finish_reason is FinishReason.ABORT
            assert result.spans == ((before, stretch),)
            continue
        assert result.spans == ((before, stretch), (after, LENGTH - stretch))
        if mode is PauseMode.RETRACT:
            written = [(*prompt, *result.output_ids[:stretch])]
            (rest,) = loop.run(answers(reference, written, "rest", LENGTH - stretch))
            assert result.output_ids[stretch:] == rest.output_ids
    # The same prompts again: nothing of the old weights is left that a new request could take over.
    fresh, expected = loop.run(answers(engine, PROMPTS, "fresh")), loop.run(answers(reference, PROMPTS, "fresh"))
    assert [result.output_ids for result in fresh] == [result.output_ids for result in expected]
    if mode is PauseMode.IN_PLACE:
        counts = loop.run(engine.health()).counts
        assert counts["old_cache_tokens"] - counted == old_cache > 0


def test_an_update_that_failed_in_the_middle_is_made_again(engines, model_dir, loop, monkeypatch):
    engine, reference = engines
    monkeypatch.setattr(engine, "_channel", TensorChannel(flush=engine._flushes))
    weights = weights_of(model_dir, 3)
    loop.run(engine.begin_update(900))
    loop.run(engine.update_weights(dict(list(weights.items())[:3])))
    with pytest.raises(EngineError, match="did not arrive"):
        loop.run(engine.commit_update(900))
    loop.run(engine.fail_update("cut short"))
    for one in (engine, reference):
        loop.run(update(one, 901, weights))
    ours, theirs = (loop.run(answers(one, PROMPTS, "again")) for one in (reference, engine))
    assert [result.output_ids for result in theirs] == [result.output_ids for result in ours]


def test_a_server_with_a_prefix_cache_is_not_adopted_for_in_place(engines, loop):
    engine, _ = engines
    (server,) = engine.servers
    in_place = replace(engine._settings, pause_mode=PauseMode.IN_PLACE)
    loop.run(check_adopted(server, in_place, 1))

    async def with_cache():
        return {**info, "disable_radix_cache": False}

    info = loop.run(server.server_info())
    assert info["disable_radix_cache"] is True
    server.server_info = with_cache
    with pytest.raises(InputError, match="keeps a prefix cache, which --pause-generation-mode in_place"):
        loop.run(check_adopted(server, in_place, 1))
    del server.server_info
