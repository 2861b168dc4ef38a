"""The fully asynchronous collector over the embedded engine while weights are updated, in every pause mode."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel import select_accelerator
from rollout.collectors.factory import create_collector
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.torch_engine.dense import DenseDecoder
from rollout.rewards.exact_match import ExactMatchReward
from samples import DataSource
from samples.config import DataConfig
from samples.sample import Sample
from samples.tokenizer import load_tokenizer
from samples.weight_spans import fitted, joined
from train.example import write_example
from train.replay.sample_types import check_sample

LENGTH = 24


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_example(tmp_path_factory.mktemp("example"), seed=0)


async def update(engine: TorchEngine, version: int, model_dir: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(model_dir / "model.safetensors")
    await engine.begin_update(version)
    await engine.update_weights({name: tensor * (1 + version / 10) for name, tensor in weights.items()})
    await engine.commit_update(version)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DenseDecoder.step

    def slow(decoder: DenseDecoder, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return step(decoder, tokens)

    monkeypatch.setattr(DenseDecoder, "step", slow)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_token_is_recorded_with_the_version_that_wrote_it(
    example: Any, mode: str, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if partial and mode != "abort":
        pytest.skip("refused by name: nothing is aborted that could go on")
    model_dir = Path(example.hf_checkpoint)
    config = RolloutConfig(
        rollout_mode="fully-async", pause_generation_mode=mode, partial_rollout=partial, rollout_batch_size=2,
        max_groups_in_flight=2,
        n_samples_per_prompt=2, rollout_max_response_len=LENGTH, rollout_min_response_len=LENGTH,
    )  # fmt: skip
    engine = TorchEngine(
        model_dir, select_accelerator("cpu"), dtype=torch.float32, max_running_requests=8, max_context_len=64,
        threads=1, pause_mode=config.pause_mode,
    )  # fmt: skip
    await engine.start()
    slow_down(monkeypatch)  # however late this thread gets its turn, the update meets responses under way
    data = DataConfig(prompt_data=(str(example.prompt_data),), label_key="label")
    source = DataSource(data, load_tokenizer(model_dir), seed=0, n_samples_per_prompt=2, max_prompt_len=16)
    collector = create_collector(
        config, RewardConfig(), engine=engine, source=source, reward=ExactMatchReward(), dynamic_filter=None, seed=0,
        max_context_len=64, num_rollout=3,
    )  # fmt: skip
    try:
        await update(engine, 0, model_dir)
        collector.weights_updated(0)
        await collector.collect(0)
        async with asyncio.timeout(60):
            while (await engine.health()).running < 4:  # all responses of two groups have begun
                await asyncio.sleep(0)
        await collector.settle()
        await update(engine, 1, model_dir)
        collector.weights_updated(1)
        output = await collector.collect(1)
    finally:
        await collector.close()
        await engine.stop()
    samples = [sample for group in output.groups for sample in group]
    assert samples
    goes_on = mode != "abort" or partial
    for sample in samples:
        spans = sample.weight_version_spans or []
        assert [version for version, _ in spans] == ([0, 1] if goes_on else [1])
        assert sum(tokens for _, tokens in spans) == sample.response_length == LENGTH
        assert (sample.weight_version, sample.last_weight_version) == (spans[0][0], 1)
        assert len(sample.rollout_log_probs or []) == LENGTH
        again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
        check_sample(again.to_dict())
        assert again == sample
    old = sum(sample.weight_version_spans[0][1] for sample in samples) if goes_on else 0
    metrics = output.metrics
    assert metrics["rollout/async/token_staleness/mean"] == pytest.approx(old / (LENGTH * len(samples)))
    assert metrics["rollout/async/token_staleness/max"] == float(goes_on)
    assert metrics["rollout/async/mixed_versions_ratio"] == float(goes_on)


STRETCHES = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5)))


@given(STRETCHES, STRETCHES)
def test_joined_stretches_say_of_every_token_what_the_parts_said(first: Any, second: Any) -> None:
    spans = joined(first, second)
    assert written(spans) == written(first) + written(second)
    assert all(tokens > 0 for _, tokens in spans)
    assert all(one[0] != other[0] for one, other in itertools.pairwise(spans))


@given(STRETCHES, st.integers(0, 30))
def test_stretches_of_a_response_that_a_hook_changed_are_as_long_as_it(spans: Any, length: int) -> None:
    said = written(fitted(spans, length, 9))
    assert said == (written(spans) + [9] * length)[:length]


def written(spans: Any) -> list[int]:
    return [version for version, tokens in spans for _ in range(tokens)]
