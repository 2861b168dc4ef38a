"""Real SGLang servers behind the real router, against the embedded engine."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from safetensors.torch import load_file

from rollout.engines.errors import EngineError
from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from rollout.event_loop import EventLoopThread
from samples.errors import InputError
from tests.rollout.sglang_cases import MARKS, embedded, servers
from train.example import write_example

pytestmark = MARKS

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [(3, 4, 5, 13), (12, 11, 3, 13), (7, 7, 7, 13), (9, 3, 12, 13), (5,), tuple(range(3, 13)) * 4]
LOG_PROB_BOUND = 2e-5  # of fp32 sums in another order, over 24 tokens of the example's model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("example"), 0).hf_checkpoint


@pytest.fixture(scope="module")
def loop():
    loop = EventLoopThread("test-servers")
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(model_dir, loop, tmp_path_factory):
    """Servers that have no weights of their own yet, as in training."""
    engine = servers(model_dir, tmp_path_factory.mktemp("servers"), load_weights=False)
    loop.run(engine.start())
    yield engine
    loop.run(engine.stop())


def weights_of(model_dir, seed):
    """Other weights for the same model: names and shapes of the checkpoint, larger values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 if tensor.dim() == 2 else tensor
        for name, tensor in load_file(model_dir / "model.safetensors").items()
    }


async def update(engine, version, weights):
    await engine.begin_update(version)
    names = sorted(weights)
    for part in (names[::2], names[1::2]):
        await engine.update_weights({name: weights[name] for name in part})
    await engine.commit_update(version)


async def answers(engine, prompts, sampling, first=0):
    requests = [GenerateRequest(f"r{first + n}", ids, sampling, 0, 0, n) for n, ids in enumerate(prompts)]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def compare(theirs, ours):
    for one, other in zip(theirs, ours, strict=True):
        assert one.output_ids == other.output_ids
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.weight_version == other.weight_version
        worst = max(abs(a - b) for a, b in zip(one.log_probs, other.log_probs, strict=True))
        assert worst < LOG_PROB_BOUND


@pytest.fixture(scope="module")
def embedded_engine(model_dir, loop):
    engine = embedded(model_dir)
    loop.run(engine.start())
    yield engine
    loop.run(engine.stop())


@pytest.mark.parametrize("channel", ["disk", "tensor"])
def test_greedy_tokens_and_log_probabilities_are_the_embedded_engines_after_every_update(
    channel, engine, embedded_engine, model_dir, loop, monkeypatch, tmp_path
):
    from rollout.engines.sglang.weights import DiskChannel, TensorChannel

    monkeypatch.setattr(
        engine, "_channel", DiskChannel(tmp_path / "weights", model_dir) if channel == "disk" else TensorChannel()
    )
    base = {"disk": 10, "tensor": 20}[channel]
    for version in (base, base + 1):
        weights = weights_of(model_dir, version)
        loop.run(update(engine, version, weights))
        loop.run(update(embedded_engine, version, weights))
        assert engine.weight_version == version
        assert [loop.run(server.weight_version()) for server in engine.servers] == [str(version)]
        compare(
            loop.run(answers(engine, PROMPTS, GREEDY)),
            loop.run(answers(embedded_engine, PROMPTS, GREEDY)),
        )


def test_sampled_log_probabilities_are_those_of_the_temperature_scaled_distribution(
    engine, embedded_engine, model_dir, loop
):
    """Each sampled token is scored again: by the embedded engine, greedily, from the text before it."""
    weights = weights_of(model_dir, 5)
    loop.run(update(engine, 30, weights))
    loop.run(update(embedded_engine, 30, weights))
    sampled = loop.run(answers(engine, PROMPTS[:2], SamplingParams(max_new_tokens=6, temperature=0.7, ignore_eos=True)))
    logits = reference_logits(model_dir, weights, [[*p, *r.output_ids] for p, r in zip(PROMPTS, sampled, strict=False)])
    for prompt, result, scores in zip(PROMPTS, sampled, logits, strict=False):
        for position, (token, log_prob) in enumerate(zip(result.output_ids, result.log_probs, strict=True)):
            expected = torch.log_softmax(scores[len(prompt) - 1 + position] / 0.7, -1)[token].item()
            assert math.isclose(log_prob, expected, abs_tol=LOG_PROB_BOUND)


def reference_logits(model_dir, weights, sequences):
    """Hugging Face's forward pass, in double precision."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in sequences]


def test_top_p_returns_the_tokens_that_were_kept(engine, embedded_engine, model_dir, loop):
    weights = weights_of(model_dir, 6)
    loop.run(update(engine, 31, weights))
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.8, ignore_eos=True)
    for result in loop.run(answers(engine, PROMPTS, sampling)):
        assert result.kept_token_ids is not None
        assert all(token in kept for token, kept in zip(result.output_ids, result.kept_token_ids, strict=True))
    (prompt, *_) = PROMPTS
    (result,) = loop.run(answers(engine, [prompt], sampling))
    (scores,) = reference_logits(model_dir, weights, [[*prompt, *result.output_ids]])
    for position, kept in enumerate(result.kept_token_ids):
        probabilities, order = torch.softmax(scores[len(prompt) - 1 + position], -1).sort(descending=True)
        before = probabilities.cumsum(0) - probabilities
        assert set(kept) == set(order[before <= 0.8].tolist())


def test_end_tokens_stop_strings_and_lengths_end_a_response_as_in_the_embedded_engine(
    engine, embedded_engine, model_dir, loop
):
    weights = weights_of(model_dir, 7)
    loop.run(update(engine, 40, weights))
    loop.run(update(embedded_engine, 40, weights))
    free = SamplingParams(max_new_tokens=24, temperature=0.0)
    (one,) = loop.run(answers(embedded_engine, PROMPTS[:1], GREEDY))
    stop_id, stop_text = one.output_ids[3], one.text[2:4]
    for sampling in (
        free,
        SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(stop_id,)),
        SamplingParams(max_new_tokens=24, temperature=0.0, stop=(stop_text,)),
    ):
        compare(loop.run(answers(engine, PROMPTS, sampling)), loop.run(answers(embedded_engine, PROMPTS, sampling)))


def test_a_wrong_update_is_refused_and_a_right_one_goes_on_after_it(engine, model_dir, loop):
    weights = weights_of(model_dir, 8)
    loop.run(engine.begin_update(50))
    with pytest.raises(InputError, match="the model has no weight 'nonsense'"):
        loop.run(engine.update_weights({"nonsense": torch.zeros(1)}))
    name = next(iter(weights))
    with pytest.raises(InputError, match="shape"):
        loop.run(engine.update_weights({name: torch.zeros(1)}))
    with pytest.raises(EngineError, match="weights did not arrive"):
        loop.run(engine.commit_update(50))
    assert engine.weight_version != 50
    loop.run(update(engine, 51, weights))
    assert engine.weight_version == 51


def test_an_aborted_request_is_answered_with_what_it_has_and_a_cancelled_one_frees_its_place(engine, loop):
    endless = SamplingParams(max_new_tokens=120, temperature=1.0, ignore_eos=True)

    async def abort_midway():
        task = asyncio.create_task(engine.generate(GenerateRequest("long", (3,), endless, 0, 0, 0)))
        while not task.done() and not (await engine.health()).running:  # it may end before anybody looks
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await engine.abort()
        return await task

    result = loop.run(abort_midway())
    assert result.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert len(result.log_probs) == len(result.output_ids) <= 120

    async def cancel():
        task = asyncio.create_task(engine.generate(GenerateRequest("gone", (3,), endless, 0, 0, 0)))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await engine.health()

    assert loop.run(cancel()).running == 0


def test_what_would_end_a_server_is_refused_before_it_is_asked(engine, loop):
    with pytest.raises(InputError, match="token id 1000 is outside the vocabulary"):
        loop.run(answers(engine, [(3, 1000)], GREEDY))
    with pytest.raises(InputError, match="leaves no room in a context of 128"):
        loop.run(answers(engine, [(3,) * 128], GREEDY))
    assert loop.run(engine.health()).alive


def test_requests_leave_no_line_in_the_routers_log(engine, loop):
    log = engine._log_dir
    before = {path: path.stat().st_size for path in log.rglob("*") if path.is_file() and "router" in str(path)}
    assert before
    quick = SamplingParams(max_new_tokens=1, temperature=0.0)
    for first in range(0, 1000, 100):
        loop.run(answers(engine, [(3, 4)] * 100, quick, first))
    assert {path: path.stat().st_size for path in before} == before


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(model_dir, loop, tmp_path):
    engine = servers(model_dir, tmp_path, sglang_overrides=("no_such_argument=1",))
    with pytest.raises(EngineError, match=r"(?s)server actor-0-regular-0 ended with status 2.*no-such-argument"):
        loop.run(engine.start())
