"""Uniform numbers, inverse-CDF sampling, top-k and top-p, stop strings."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.protocol import FinishReason, GenerateRequest, SamplingParams
from rollout.engines.torch_engine.detokenize import Detokenizer, StopStringWatch
from rollout.engines.torch_engine.sampling import SamplingPlan, keep_likeliest, sample
from rollout.engines.torch_engine.uniforms import stream_key, stream_output, uniforms

CPU = torch.device("cpu")


def plan(*params: SamplingParams, vocab: int = 50) -> SamplingPlan:
    return SamplingPlan.of(params, vocab, CPU)


def test_stream_is_splitmix64():
    # First outputs of the published algorithm seeded with 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = np.full(5, 1234567, dtype=np.uint64)
    assert stream_output(states, np.arange(5, dtype=np.uint64)).tolist() == known


def test_uniforms_are_uniform_and_unrelated_between_samples():
    keys = np.array([stream_key(1, 2, sample) for sample in range(200)], dtype=np.uint64)
    draws = np.stack([uniforms(keys, np.full(200, p, dtype=np.uint64)) for p in range(200)])
    assert (draws >= 0).all()
    assert (draws < 1).all()
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 44  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.25
    assert abs(np.corrcoef(draws[0], draws[1])[0, 1]) < 0.25


def test_stream_keys_differ_in_every_number_and_take_any_integer():
    keys = {stream_key(s, r, i) for s in (-1, 0, 1, 2**40) for r in (0, 1) for i in range(50)}
    assert len(keys) == 400


def test_sampled_frequencies_follow_the_probabilities():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 2
    count = 20_000
    draws = torch.from_numpy(uniforms(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64)))
    drawn = sample(logits.expand(count, -1), draws, plan(SamplingParams(1, temperature=0.5), vocab=20))
    expected = torch.softmax(logits[0].double() / 0.5, -1)
    counts = torch.bincount(drawn.tokens, minlength=20)
    assert ((counts - count * expected) ** 2 / (count * expected)).sum() < 50
    log_probs = torch.log_softmax(logits[0].double() / 0.5, -1)[drawn.tokens]
    assert torch.allclose(drawn.log_probs.double(), log_probs, atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-52])
def test_extreme_uniforms_never_pick_what_was_filtered_out(uniform):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 4
    drawn = sample(logits, torch.full((64,), uniform, dtype=torch.float64), plan(*[SamplingParams(1, top_k=3)] * 64))
    assert drawn.kept is not None
    assert drawn.kept.sum(1).tolist() == [3] * 64
    assert drawn.kept.gather(1, drawn.tokens[:, None]).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.one_of(st.just(-1), st.integers(1, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    scale=st.floats(0.1, 8.0),
)
def test_kept_tokens_are_those_of_transformers(seed, top_k, top_p, scale):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    expected = logits
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    kept = keep_likeliest(torch.softmax(logits, -1), plan(*[SamplingParams(1, top_k=top_k, top_p=top_p)] * 6))
    assert torch.equal(kept, expected > -torch.inf)


def test_rows_of_one_batch_keep_their_own_parameters():
    rows = (
        SamplingParams(1),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_k=1, temperature=2.0),
        SamplingParams(1, top_p=0.5),
    )
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
    draws = torch.full((4,), 0.77, dtype=torch.float64)
    together = sample(logits, draws, plan(*rows))
    for index, params in enumerate(rows):
        one = sample(logits[index : index + 1], draws[:1], plan(params))
        assert one.tokens[0] == together.tokens[index]
        assert one.log_probs[0] == together.log_probs[index]
    assert together.tokens[1] == logits[1].argmax()
    assert together.tokens[2] == logits[2].argmax()


async def test_engine_records_kept_tokens_of_the_scaled_distribution(tiny_model, serve):
    model = tiny_model("qwen3")
    params = SamplingParams(8, temperature=0.8, top_p=0.7, top_k=20, ignore_eos=True)
    prompt = (5, 6, 7)
    async with serve(model) as engine:
        filtered, plain = await asyncio.gather(
            engine.generate(GenerateRequest("a", prompt, params, 0, 0, 0)),
            engine.generate(GenerateRequest("b", prompt, SamplingParams(8), 0, 0, 1)),
        )
    assert plain.kept_token_ids is None
    log_probs = model.log_probs([*prompt, *filtered.output_ids], 0.8)[2:-1]
    kept = keep_likeliest(log_probs.exp(), plan(*[params] * 8, vocab=90))
    assert filtered.kept_token_ids == [row.nonzero()[:, 0].tolist() for row in kept]
    assert all(token in ids for token, ids in zip(filtered.output_ids, filtered.kept_token_ids, strict=True))


async def test_stop_string_may_straddle_tokens_and_stays_in_the_response(tiny_model, serve):
    model = tiny_model("qwen3")
    prompt = (9, 8, 7)
    async with serve(model) as engine:

        async def one(**sampling):
            params = SamplingParams(**({"max_new_tokens": 40, "temperature": 0.7, "ignore_eos": True} | sampling))
            return await engine.generate(GenerateRequest("a", prompt, params, 3, 0, 0))

        free = await one()
        stop = free.text[10:13]  # three characters, so three tokens
        end = free.text.index(stop) + 3
        stopped = await one(stop=("never there", stop))
        late = await one(stop=(stop,), min_new_tokens=end + 1)
    assert (stopped.text, stopped.finish_reason) == (free.text[:end], FinishReason.STOP)
    assert stopped.output_ids == free.output_ids[: len(stopped.output_ids)]
    assert late.output_ids[: end + 1] == free.output_ids[: end + 1]


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8, so that a character may take several."""

    is_fast = False
    clean_up_tokenization_spaces = False

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(min_size=1, max_size=30), st.data())
def test_watch_finds_a_stop_string_at_the_token_that_completes_it(text, data):
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    if "\N{REPLACEMENT CHARACTER}" in text:
        return
    watch = StopStringWatch(Detokenizer(Bytes()), (stop,))
    found = [watch.found(token) for token in text.encode()]
    first = len(text[: text.index(stop) + len(stop)].encode()) - 1
    assert found.index(True) == first
