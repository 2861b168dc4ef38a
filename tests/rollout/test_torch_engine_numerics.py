"""The embedded engine says what transformers says: greedy tokens and log-probabilities."""

import asyncio
import random

import pytest
import torch

from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from samples.errors import InputError


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(1, 90) for _ in range(draw.randrange(1, longest))) for _ in range(count)]


async def answer(engine, inputs, params):
    requests = (GenerateRequest(str(i), ids, params, 0, 0, i) for i, ids in enumerate(inputs))
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def log_prob_error(model, prompt, result, temperature=1.0) -> float:
    """Largest difference to a transformers forward over prompt and response."""
    reference = model.log_probs([*prompt, *result.output_ids], temperature)[len(prompt) - 1 : -1]
    chosen = reference.gather(1, torch.tensor(result.output_ids)[:, None])[:, 0]
    return (chosen - torch.tensor(result.log_probs)).abs().max().item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
async def test_greedy_tokens_and_log_probs_equal_transformers(tiny_model, serve, family, tied):
    model = tiny_model(family, tied=tied)
    inputs = prompts(64)
    async with serve(model, max_running_requests=64) as engine:
        assert engine.description == "dense decoder"
        results = await answer(engine, inputs, SamplingParams(12, temperature=0.0, ignore_eos=True))
    assert [r.output_ids for r in results] == [model.greedy(list(ids), 12) for ids in inputs]
    assert max(log_prob_error(model, ids, r) for ids, r in zip(inputs, results, strict=True)) < 1e-5


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ],
)
async def test_options_of_the_configuration_are_followed(tiny_model, serve, family, settings):
    model = tiny_model(family, **settings)
    inputs = prompts(6, longest=60)
    async with serve(model, decoder="dense") as engine:
        results = await answer(engine, inputs, SamplingParams(8, temperature=0.7, ignore_eos=True))
    assert max(log_prob_error(model, ids, r, 0.7) for ids, r in zip(inputs, results, strict=True)) < 1e-5


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen3", {}, "asked for"),
        ("llama", DYNAMIC, "rope_type 'dynamic'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window layers"),
        ("mistral", {"sliding_window": 8}, "model_type 'mistral'"),
        ("qwen3_moe", EXPERTS, "model_type 'qwen3_moe'"),
    ],
)
async def test_other_models_go_through_transformers_in_a_joined_batch(tiny_model, serve, family, settings, why):
    model = tiny_model(family, **settings)
    inputs = prompts(12, longest=20)
    params = [SamplingParams(3 + i, temperature=0.0, ignore_eos=True) for i in range(12)]
    async with serve(model, decoder="general", max_running_requests=8) as engine:
        requests = [GenerateRequest(str(i), ids, params[i], 0, 0, i) for i, ids in enumerate(inputs)]
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
    if why != "asked for":
        async with serve(model) as engine:
            assert engine.description == f"general decoder ({why})"
    for ids, result, param in zip(inputs, results, params, strict=True):
        assert result.output_ids == model.greedy(list(ids), param.max_new_tokens)
        assert log_prob_error(model, ids, result) < 1e-5


async def test_bfloat16_stays_near_float32(tiny_model, serve):
    model = tiny_model("qwen3")
    inputs = prompts(8)
    async with serve(model, dtype=torch.bfloat16) as engine:
        results = await answer(engine, inputs, SamplingParams(8, temperature=0.0, ignore_eos=True))
    assert max(log_prob_error(model, ids, r) for ids, r in zip(inputs, results, strict=True)) < 0.3


async def test_responses_end_by_token_by_length_and_by_context(tiny_model, serve):
    model = tiny_model("qwen3")
    prompt = prompts(1)[0]
    greedy = model.greedy(list(prompt), 20)
    async with serve(model, max_context_len=len(prompt) + 15) as engine:

        async def one(**sampling):
            params = SamplingParams(**({"max_new_tokens": 10, "temperature": 0.0, "ignore_eos": True} | sampling))
            return await engine.generate(GenerateRequest("a", prompt, params, 0, 0, 0))

        by_length, by_context = await one(), await one(max_new_tokens=100)
        by_token = await one(stop_token_ids=(greedy[3],))
    assert (by_length.output_ids, by_length.finish_reason) == (greedy[:10], FinishReason.LENGTH)
    assert (by_context.output_ids, by_context.finish_reason) == (greedy[:15], FinishReason.LENGTH)
    end = greedy.index(greedy[3]) + 1
    assert (by_token.output_ids, by_token.finish_reason) == (greedy[:end], FinishReason.STOP)


async def test_end_token_is_suppressed_before_min_new_tokens(tiny_model, serve):
    model = tiny_model("qwen3")
    inputs = prompts(40)
    async with serve(model, max_running_requests=40) as engine:
        short = await answer(engine, inputs, SamplingParams(20, temperature=3.0))
        long = await answer(engine, inputs, SamplingParams(20, temperature=3.0, min_new_tokens=12))
    assert any(r.finish_reason is FinishReason.STOP and len(r.output_ids) < 12 for r in short)
    assert all(0 not in r.output_ids[:11] and len(r.output_ids) >= 12 for r in long)
    for ids, r in zip(inputs, long, strict=True):  # the distribution that is reported is the unmasked one
        assert log_prob_error(model, ids, r, 3.0) < 1e-5


async def test_dense_decoder_refuses_what_it_does_not_serve(tiny_model, serve):
    with pytest.raises(InputError, match="mlp_bias"):
        async with serve(tiny_model("llama", mlp_bias=True), decoder="dense"):
            pass
