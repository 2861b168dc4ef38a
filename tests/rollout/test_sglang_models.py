"""Two models behind routers of their own, on real servers that start at once: one is trained, one stays as it was."""

from __future__ import annotations

import asyncio

import pytest
import torch
from aiohttp import ClientSession
from safetensors.torch import load_file

from accel import select_accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import SGLangConfig
from rollout.deploy.run_layout import run_layout
from rollout.engines.protocol import GenerateRequest, SamplingParams
from rollout.engines.sglang.opening import open_servers
from tests.rollout.sglang_cases import CONTEXT, MARKS, embedded
from train.example import write_example

pytestmark = [*MARKS, pytest.mark.nightly]

PROMPTS = [(3, 4, 5, 13), (12, 11, 3, 13)]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


async def answers(engine):
    requests = [GenerateRequest(f"r{n}", ids, GREEDY, 0, 0, n) for n, ids in enumerate(PROMPTS)]
    return [result.output_ids for result in await asyncio.gather(*map(engine.generate, requests))]


async def update(engine, weights, version):
    await engine.begin_update(version)
    await engine.update_weights(weights)
    await engine.commit_update(version)


async def ask(address, prompt):
    """As a function of the user's does."""
    host, port = address
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    async with ClientSession() as session:
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        async with session.post(f"http://{host}:{port}/generate", json=body) as reply:
            return (await reply.json())["output_ids"]


async def test_servers_start_at_once_and_only_the_trained_model_gets_weights(tmp_path):
    actor_dir = write_example(tmp_path / "actor", 0).hf_checkpoint
    judge_dir = write_example(tmp_path / "judge", 1).hf_checkpoint
    description = tmp_path / "servers.yaml"
    description.write_text(
        f"models:\n  - {{name: judge, model_path: {judge_dir}, server_groups: [{{num_gpus: 1}}]}}\n"
        "  - {name: actor, server_groups: [{num_gpus: 1}]}\n"
    )
    config = SGLangConfig(sglang_log_dir=str(tmp_path / "logs"), sglang_config=str(description))
    engine = open_servers(
        RolloutConfig(engine_max_running_requests=8, engine_max_total_tokens=2048),
        config,
        run_layout(config, num_gpus=None, num_gpus_per_engine=1),
        select_accelerator("cpu"),
        model_dir=actor_dir,
        dtype=torch.float32,
        max_context_len=CONTEXT,
        load_weights=False,
        seed=0,
        threads=1,
        trust_remote_code=False,
    )
    weights = load_file(actor_dir / "model.safetensors")
    reference, judge = embedded(actor_dir), embedded(judge_dir)
    await asyncio.gather(reference.start(), judge.start())
    await update(reference, weights, 1)
    await update(judge, load_file(judge_dir / "model.safetensors"), 1)
    await engine.start()
    try:
        servers = [server for one in engine._engines for server in one.servers]
        assert max(server.launched_at for server in servers) < min(server.ready_at for server in servers)
        routers = engine.model_routers
        assert sorted(routers) == ["actor", "judge"]
        assert len({port for _, port in routers.values()}) == 2
        of_the_judge = await answers(judge)
        assert [await ask(routers["judge"], prompt) for prompt in PROMPTS] == of_the_judge
        await update(engine, weights, 1)
        assert engine.weight_version == 1
        of_the_actor = await answers(engine)
        assert of_the_actor == await answers(reference)
        assert [await ask(routers["actor"], prompt) for prompt in PROMPTS] == of_the_actor
        assert [await ask(routers["judge"], prompt) for prompt in PROMPTS] == of_the_judge
        assert (await engine.health()).alive
    finally:
        await engine.stop()
        await asyncio.gather(reference.stop(), judge.stop())
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert {"actor-0-regular-0.log", "judge-0-regular-0.log", "router-actor.log", "router-judge.log"} <= logs
