"""Real servers and the real router, killed in the middle of a rollout."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from rollout.engines.errors import EngineError
from rollout.engines.protocol import GenerateRequest, SamplingParams
from samples.errors import InputError
from tests.rollout.sglang_cases import MARKS, embedded, kill_program, servers
from train.example import write_example

pytestmark = [*MARKS, pytest.mark.nightly]

LONG = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)


async def update(engine, weights):
    await engine.begin_update(1)
    await engine.update_weights(weights)
    await engine.commit_update(1)


async def answers(engine, kill=None):
    requests = [GenerateRequest(f"r{n}", (3 + n % 10, 4, 13), LONG, 0, 0, n) for n in range(24)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    if kill is not None:
        await asyncio.sleep(0.5)
        kill_program(kill)
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("channel", ["disk", "tensor"])
async def test_no_sample_is_lost_or_doubled_when_a_server_and_then_the_router_are_killed(channel, tmp_path):
    model_dir = write_example(tmp_path / "example", 0).hf_checkpoint
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 if tensor.dim() == 2 else tensor
        for name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    reference = embedded(model_dir)
    await reference.start()
    await update(reference, weights)
    expected = [result.output_ids for result in await answers(reference)]
    await reference.stop()

    engine = servers(
        model_dir,
        tmp_path / "servers",
        engines=2,
        load_weights=False,
        weight_channel=channel,
        max_engine_restarts=1,
    )
    await engine.start()
    try:
        await update(engine, weights)
        for killed, counts in (
            (None, (0, 0)),
            (engine.servers[0]._process, (1, 0)),
            (engine.router._process, (1, 1)),
        ):
            results = await answers(engine, kill=killed)
            assert [result.request_id for result in results] == [f"r{n}" for n in range(24)]
            assert [result.output_ids for result in results] == expected
            for _ in range(1200):  # nothing waits for the restart where the other server answered everything
                health = await engine.health()
                if health.alive and (health.counts["restarts"], health.counts["router_restarts"]) == counts:
                    break
                await asyncio.sleep(0.25)
            assert (health.counts["restarts"], health.counts["router_restarts"]) == counts
            async with engine._running().lock:
                assert sorted(await engine.router.workers()) == sorted(server.url for server in engine.servers)
            assert [await server.weight_version() for server in engine.servers] == ["1", "1"]
        kill_program(engine.servers[1]._process)
        while engine._running().failure is None:
            await asyncio.sleep(0.1)
        with pytest.raises(
            EngineError, match=r"server actor-0-regular-1 died, and --max-engine-restarts 1 are used up"
        ):
            await answers(engine)
    finally:
        await engine.stop()


async def test_a_server_started_by_hand_is_adopted_used_and_left_running(tmp_path):
    """Its own process first, then a run that is given nothing but the address."""
    model_dir = write_example(tmp_path / "example", 0).hf_checkpoint
    by_hand = servers(model_dir, tmp_path / "by_hand")
    await by_hand.start()
    (server,) = by_hand.servers
    address = server.url.removeprefix("http://")
    try:
        run = servers(model_dir, tmp_path / "run", load_weights=False, rollout_external_engine_addrs=(address,))
        await run.start()
        weights = load_file(model_dir / "model.safetensors")
        await update(run, weights)
        results = await answers(run)
        assert {result.weight_version for result in results} == {1}
        await run.stop()
        assert await server.is_healthy(30)
        other = servers(model_dir, tmp_path / "run", rollout_external_engine_addrs=(address,), per_engine=2)
        with pytest.raises(InputError, match=r"has tensor parallel size 1, --rollout-num-gpus-per-engine says 2"):
            await other.start()
        assert await server.is_healthy(30)
    finally:
        await by_hand.stop()
