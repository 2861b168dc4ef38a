"""New weights: whole or not at all, under running requests, tied or not; and memory given back."""

import asyncio

import pytest
import torch

from rollout.engines.errors import EngineError
from rollout.engines.protocol import GenerateRequest, SamplingParams
from samples.errors import InputError

PARAMS = SamplingParams(10, temperature=0.0, ignore_eos=True)
REQUEST = GenerateRequest("a", (1, 2, 3, 4), PARAMS, 0, 0, 0)


async def update(engine, version, tensors):
    """The whole protocol, in buckets of three tensors."""
    await engine.begin_update(version)
    names = list(tensors)
    for start in range(0, len(names), 3):
        await engine.update_weights({name: tensors[name] for name in names[start : start + 3]})
    await engine.commit_update(version)


@pytest.mark.parametrize("decoder", ["dense", "general"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
async def test_updated_engine_answers_as_the_new_model(tiny_model, serve, family, tied, decoder):
    old, new = tiny_model(family, tied=tied, seed=0), tiny_model(family, tied=tied, seed=1)
    async with serve(old, decoder=decoder) as engine:
        assert engine.weight_version == -1
        assert (await engine.generate(REQUEST)).output_ids == old.greedy([1, 2, 3, 4], 10)
        await update(engine, 7, new.weights())
        result = await engine.generate(REQUEST)
    assert result.output_ids == new.greedy([1, 2, 3, 4], 10)
    assert engine.weight_version == -1  # stopped
    assert result.weight_version == 7


async def test_experts_that_transformers_keeps_fused_arrive_one_by_one(tiny_model, serve):
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    old, new = (tiny_model("qwen3_moe", tied=False, seed=seed, **experts) for seed in (0, 1))
    async with serve(old) as engine:
        await update(engine, 1, new.weights())
        assert (await engine.generate(REQUEST)).output_ids == new.greedy([1, 2, 3, 4], 10)


async def test_of_fused_experts_some_may_stay_and_all_can_be_compared(tiny_model, serve):
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    old, new = (tiny_model("qwen3_moe", tied=False, seed=seed, **experts) for seed in (0, 1))
    changed = {name: tensor for name, tensor in new.weights().items() if "experts.2.up" in name or "norm" in name}
    expected = old.weights() | changed
    async with serve(old) as engine:
        assert await engine.held_version() == -1
        await engine.begin_update(1)
        await engine.update_weights(changed)
        await engine.keep_weights(frozenset(expected) - frozenset(changed))
        await engine.commit_update(1)
        assert await engine.differing_weights(expected) == []
        different = await engine.differing_weights(old.weights())
        assert different
        assert set(different) <= set(changed)


async def test_engine_started_without_weights_refuses_until_all_have_come(tiny_model, serve):
    model = tiny_model("qwen3")
    async with serve(model, load_weights=False) as engine:
        with pytest.raises(EngineError, match="without weights"):
            await engine.generate(REQUEST)
        await update(engine, 0, model.weights())
        assert (await engine.generate(REQUEST)).output_ids == model.greedy([1, 2, 3, 4], 10)


@pytest.mark.parametrize("decoder", ["dense", "general"])
async def test_update_under_running_requests_goes_on_from_their_tokens(tiny_model, serve, decoder):
    old, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    params = SamplingParams(100, temperature=0.0, ignore_eos=True)
    requests = [GenerateRequest(str(i), (1 + i, 2, 3), params, 0, 0, i) for i in range(3)]
    async with serve(old, decoder=decoder) as engine:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while not (await engine.health()).running:
            await asyncio.sleep(0)
        await engine.begin_update(1)
        done = (await engine.health()).extra["generated_tokens"] / 3
        await engine.update_weights(new.weights())
        await asyncio.sleep(0.02)
        assert (await engine.health()).extra["generated_tokens"] / 3 == done
        await engine.commit_update(1)
        results = await asyncio.gather(*tasks)
    before = int(done)
    assert before == done
    assert 0 < before < 100
    for request, result in zip(requests, results, strict=True):
        prompt = list(request.input_ids)
        assert result.output_ids[:before] == old.greedy(prompt, before)
        assert result.output_ids[before:] == new.greedy(prompt + result.output_ids[:before], 100 - before)
        assert result.weight_version == -1  # of its first token


async def test_failed_update_keeps_the_engine_paused_until_a_whole_one(tiny_model, serve):
    """slime 2280: a shard that is sent as a whole tensor is refused by its shape."""
    model, new = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    tensors = new.weights()
    head = dict(list(tensors.items())[:4])
    params = SamplingParams(150, temperature=0.0, ignore_eos=True)
    async with serve(model) as engine:
        await update(engine, 1, model.weights())
        task = asyncio.ensure_future(engine.generate(GenerateRequest("long", (1, 2), params, 0, 0, 0)))
        await asyncio.sleep(0.01)

        await engine.begin_update(2)
        await engine.update_weights(head)
        with pytest.raises(InputError, match=f"{len(tensors) - 4} of {len(tensors)} tensors did not arrive"):
            await engine.commit_update(2)
        with pytest.raises(EngineError, match="update to weight version 2 failed"):
            await engine.generate(REQUEST)
        assert "version 2 failed" in (await engine.health()).detail
        assert engine.weight_version == 1

        await engine.begin_update(3)
        with pytest.raises(InputError, match=r"no_such.weight is no tensor of this model"):
            await engine.update_weights({**head, "no_such.weight": torch.zeros(1)})
        with pytest.raises(EngineError, match="version 3 failed"):
            await engine.update_weights(head)

        await engine.begin_update(4)
        with pytest.raises(InputError, match=r"model.norm.weight has shape \[63\], the model needs \[64\]"):
            await engine.update_weights({"model.norm.weight": torch.zeros(63)})
        assert not task.done()

        await update(engine, 5, tensors)
        assert len((await task).output_ids) == 150
        result = await engine.generate(REQUEST)
    assert (result.output_ids, result.weight_version) == (new.greedy([1, 2, 3, 4], 10), 5)


async def test_commit_needs_the_version_that_was_begun(tiny_model, serve):
    model = tiny_model("qwen3")
    async with serve(model) as engine:
        with pytest.raises(EngineError, match="call begin_update first"):
            await engine.update_weights(model.weights())
        await engine.begin_update(2)
        await engine.update_weights(model.weights())
        with pytest.raises(InputError, match="version 3 given, but begin_update said 2"):
            await engine.commit_update(3)
        await engine.commit_update(2)
        assert engine.weight_version == 2


@pytest.mark.parametrize("decoder", ["dense", "general"])
async def test_tied_head_may_be_sent_if_it_equals_the_embedding(tiny_model, serve, decoder):
    model = tiny_model("qwen3", tied=True)
    tensors = model.weights()
    async with serve(model, decoder=decoder) as engine:
        await update(engine, 1, {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors})
        with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
            await update(engine, 2, {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1, **tensors})


async def test_untied_head_has_to_come_and_is_followed(tiny_model, serve):
    """vllm 51665: an engine that unties head and embedding never goes on with the head of before."""
    model = tiny_model("qwen3", tied=False)
    tensors = model.weights()
    async with serve(model) as engine:
        with pytest.raises(InputError, match=r"1 of .* did not arrive: lm_head.weight"):
            await update(engine, 1, {name: t for name, t in tensors.items() if name != "lm_head.weight"})
        flipped = tensors["lm_head.weight"].flip(0)
        await update(engine, 2, tensors | {"lm_head.weight": flipped})
        first = (await engine.generate(REQUEST)).output_ids[0]
    assert first == 89 - model.greedy([1, 2, 3, 4], 1)[0]


async def test_update_drops_cached_nan_of_diverged_weights(tiny_model, serve):
    model = tiny_model("qwen3")
    tensors = model.weights()
    async with serve(model) as engine:
        await update(engine, 1, {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()})
        with pytest.raises(EngineError, match=r"not finite \(weight version 1\)"):
            await engine.generate(REQUEST)
        await update(engine, 2, tensors)
        assert (await engine.generate(REQUEST)).output_ids == model.greedy([1, 2, 3, 4], 10)


@pytest.mark.parametrize("decoder", ["dense", "general"])
async def test_released_memory_is_gone_and_comes_back_with_new_weights(tiny_model, serve, decoder, monkeypatch):
    from rollout.engines.torch_engine.runner import Runner

    runners = []
    submit = Runner.submit
    monkeypatch.setattr(Runner, "submit", lambda self, sequences: (runners.append(self), submit(self, sequences))[1])
    model = tiny_model("qwen3")
    params = SamplingParams(100, temperature=0.0, ignore_eos=True)
    async with serve(model, decoder=decoder, max_total_tokens=4096) as engine:
        task = asyncio.ensure_future(engine.generate(GenerateRequest("b", (1, 2), params, 0, 0, 0)))
        while not (await engine.health()).running:
            await asyncio.sleep(0)
        await engine.release_memory()
        assert held_bytes(runners[0]._decoder) < 50_000
        with pytest.raises(EngineError, match=r"released \(graphs, kv_cache, weights\): call resume_memory"):
            await engine.generate(REQUEST)
        with pytest.raises(EngineError, match="call resume_memory before an update"):
            await engine.begin_update(1)
        await engine.resume_memory(("weights",))
        await update(engine, 1, model.weights())
        with pytest.raises(EngineError, match=r"released \(graphs, kv_cache\)"):
            await engine.generate(REQUEST)
        await engine.resume_memory(("kv_cache", "graphs"))
        assert (await engine.generate(REQUEST)).output_ids == model.greedy([1, 2, 3, 4], 10)
        assert (await task).output_ids == model.greedy([1, 2], 100)
        with pytest.raises(InputError, match="memory tag 'wieghts' is unknown"):
            await engine.release_memory(("wieghts",))


def held_bytes(decoder) -> int:
    """Bytes of all distinct tensors that the decoder leads to, its tables of positions included."""
    seen: dict[int, int] = {}
    stack, visited = [decoder], set()
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return sum(seen.values())
