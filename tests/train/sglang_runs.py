"""Runs with real SGLang servers in the test's own process, so that a test can look into them and disturb them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel import select_accelerator
from rollout.deploy.router import Worker
from rollout.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.weights import DiskChannel, TensorChannel
from rollout.engines.torch_engine import TorchEngine
from train import main as command
from train.inline import InlineRuntime

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [(3, 4, 5, 13), (12, 11, 3, 13), (7, 7, 7, 13), (5,), tuple(range(3, 13)) * 4]
LOG_PROB_BOUND = 2e-5  # of fp32 sums in another order


class WatchedRun(InlineRuntime):
    """``before_update`` and ``after_update`` get the run and the version; ``before_step`` the run and the step."""

    before_update: Callable[[WatchedRun, int], None] = staticmethod(lambda run, version: None)
    after_update: Callable[[WatchedRun, int], None] = staticmethod(lambda run, version: None)
    before_step: Callable[[WatchedRun, int], None] = staticmethod(lambda run, step: None)

    @property
    def engine(self) -> SGLangEngine:
        return self._rollout._worker._engine

    def do(self, coroutine):
        return self._rollout._worker._loop.run(coroutine)

    def exported(self) -> dict[str, torch.Tensor]:
        """The trainer's weights, whole."""
        return {name: tensor.clone() for name, tensor in self._trainer._trainer.export_weights()}

    def use_channel(self, name: str) -> None:
        """Open another channel for the updates to come."""
        engine = self.engine
        if name != "distributed":
            directory = engine._log_dir / "weights"
            engine._channel.close()
            engine._channel = DiskChannel(directory, engine._settings.model_dir) if name == "disk" else TensorChannel()
        channel = "server_group" if name == "distributed" else "in_process"
        self._updater.open(dataclasses.replace(self._updater.plan, channel=channel, keeps_weights=True))

    def step(self, rollout_id: int):
        self.before_step(self, rollout_id)
        return super().step(rollout_id)

    def _hand_over(self):
        self.before_update(self, self._version + 1)
        metrics = super()._hand_over()
        self.after_update(self, self._version)
        return metrics


def run_watched(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *flags: str, **watchers: Callable[..., None]) -> int:
    """``accelrl train`` with real servers, here; the exit status."""

    def make(prepared, progress):
        run = WatchedRun(prepared.config, prepared.accelerator, progress, prepared.run_dir)
        for name, watcher in watchers.items():
            setattr(run, name, watcher)
        return run

    monkeypatch.setattr(command, "make_runtime", make)
    arguments = ["--accelerator", "cpu", "--launcher", "inline", "--rollout-engine", "sglang", "--progress", "plain"]
    return command.run([*arguments, "--output-dir", str(run_dir), *flags])


async def greedy(engine, name: str) -> list[GenerateResult]:
    requests = [GenerateRequest(f"{name}-{n}", ids, GREEDY, 0, 0, n) for n, ids in enumerate(PROMPTS)]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


class Comparison:
    """An embedded engine that is given the trainer's weights after every update, and asked the same as the servers."""

    def __init__(self, last: int) -> None:
        self.last = last  # version, after which the embedded engine ends
        self.engine: TorchEngine | None = None
        self.versions: list[int] = []
        self.largest = 0.0

    def __call__(self, run: WatchedRun, version: int) -> None:
        run.do(self._compare(run, version))
        if version == self.last:
            run.do(self.engine.stop())

    async def _compare(self, run: WatchedRun, version: int) -> None:
        if self.engine is None:
            settings = run.engine._settings
            self.engine = TorchEngine(
                settings.model_dir,
                select_accelerator("cpu"),
                dtype=torch.float32,
                max_running_requests=8,
                max_context_len=settings.max_context_len,
                load_weights=False,
                threads=1,
            )
            await self.engine.start()
        await self.engine.begin_update(version)
        await self.engine.update_weights(run.exported())
        await self.engine.commit_update(version)
        assert [await server.weight_version() for server in run.engine.servers] == [str(version)] * len(
            run.engine.servers
        )
        for server in run.engine.servers if len(run.engine.servers) > 1 else [None]:
            for theirs, ours in zip(await self._asked(run, server), await greedy(self.engine, "ours"), strict=True):
                assert theirs.output_ids == ours.output_ids
                assert theirs.weight_version == ours.weight_version == version
                worst = max(abs(a - b) for a, b in zip(theirs.log_probs, ours.log_probs, strict=True))
                self.largest = max(self.largest, worst)
        assert self.largest < LOG_PROB_BOUND
        self.versions.append(version)

    async def _asked(self, run: WatchedRun, server) -> list[GenerateResult]:
        """Through the router, or of one server alone."""
        engine = run.engine
        if server is None:
            return await greedy(engine, "theirs")
        others = [one for one in engine.servers if one is not server]
        for one in others:
            await engine.router.deregister(one.url)
        try:
            return await greedy(engine, "theirs")
        finally:
            for one in others:
                await engine.router.register(Worker(one.url))
