"""The fully asynchronous collector with the real group runner, data source, hooks and reward in front of a scripted
engine: what users of such systems reported."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rollout.collectors.base import Collector
from rollout.collectors.factory import create_collector
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.protocol import EngineCapabilities, FinishReason, GenerateRequest, GenerateResult
from rollout.rewards.exact_match import ExactMatchReward
from samples import DataSource
from samples.config import DataConfig
from samples.errors import InputError
from samples.sample import Group, Sample
from samples.tokenizer import load_tokenizer
from train.example import write_example

GROUP_SIZE = 3


class Engine:
    """Answers after ``seconds`` with the weights of the moment it began with; aborts when told to."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.capabilities = EngineCapabilities(keeps_requests_across_updates=keeps)
        self.version = 0
        self.seconds = 0.01
        self.running: set[int] = set()
        self.cancelled: list[int] = []
        self.broken: dict[int, int] = {}  # sample index -> how often it still raises
        self.requests: list[GenerateRequest] = []
        self._aborts: dict[str, asyncio.Event] = {}

    @property
    def weight_version(self) -> int:
        return self.version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        index, version = request.sample_index, self.version
        self.requests.append(request)
        self.running.add(index)
        stop = self._aborts[request.request_id] = asyncio.Event()
        try:
            if self.broken.get(index, 0):
                self.broken[index] -= 1
                await asyncio.sleep(self.seconds / 2)
                raise OSError(f"the line to the engine broke at sample {index}")
            await asyncio.wait_for(stop.wait(), self.seconds)
            reason = FinishReason.ABORT
        except TimeoutError:
            reason = FinishReason.STOP
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        finally:
            self.running.discard(index)
        return GenerateResult(request.request_id, [3 + version], [-0.5 - version], reason, "7", version)

    async def abort(self, request_id: str | None = None) -> None:
        for stop in self._aborts.values():
            stop.set()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_example(tmp_path_factory.mktemp("example"), seed=0)


def make(example: Any, engine: Engine, *, dynamic_filter: Any = None, **settings: Any) -> tuple[Collector, DataSource]:
    values = {"rollout_mode": "fully-async", "rollout_batch_size": 4, "n_samples_per_prompt": GROUP_SIZE}
    config = RolloutConfig.model_validate(values | {"rollout_max_response_len": 2} | settings)
    data = DataConfig(prompt_data=(str(example.prompt_data),), label_key="label")
    tokenizer = load_tokenizer(Path(example.hf_checkpoint))
    source = DataSource(data, tokenizer, seed=0, n_samples_per_prompt=GROUP_SIZE, max_prompt_len=16)
    collector = create_collector(
        config,
        RewardConfig(),
        engine=engine,  # type: ignore[arg-type]
        source=source,
        reward=ExactMatchReward(),
        dynamic_filter=dynamic_filter,
        seed=0,
        max_context_len=32,
        num_rollout=50,
    )
    return collector, source


async def collect_steps(collector: Collector, count: int) -> list[int | None]:
    return [group[0].group_index for step in range(count) for group in (await collector.collect(step)).groups]


async def test_one_broken_response_cancels_its_siblings_and_the_group_is_tried_again(example: Any) -> None:
    engine = Engine()
    engine.broken = {4: 2}  # in group 1
    collector, _ = make(example, engine)
    assert sorted(await collect_steps(collector, 3)) == list(
        range(12)
    )  # it did not vanish, and nobody waited for it for ever
    assert sorted(engine.cancelled) == [3, 3, 5, 5]
    await collector.close()


async def test_a_response_that_stays_broken_ends_the_run_with_the_engines_own_error(example: Any) -> None:
    engine = Engine()
    engine.broken = {4: 99}
    collector, _ = make(example, engine, max_group_retries=1)
    with pytest.raises(OSError, match="the line to the engine broke at sample 4"):
        await collect_steps(collector, 5)
    await collector.close()
    assert not engine.running


async def test_closing_leaves_no_task_and_gives_every_prompt_back(example: Any) -> None:
    engine = Engine()
    engine.seconds = 3600.0
    collector, source = make(example, engine)
    collecting = asyncio.ensure_future(collector.collect(0))
    await asyncio.sleep(0.05)
    assert len(engine.running) == 8 * GROUP_SIZE
    await collector.close()
    with pytest.raises(RuntimeError, match="closed"):
        await collecting
    assert not engine.running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    again = [group[0].group_index for group in source.next_groups(9)]
    assert again == list(range(9))  # in their order, before new ones


@pytest.mark.parametrize("partial", [False, True])
async def test_an_engine_that_cannot_go_on_under_new_weights_is_aborted_first(example: Any, partial: bool) -> None:
    engine = Engine(keeps=False)
    collector, _ = make(example, engine, partial_rollout=partial, max_groups_in_flight=4)
    await collector.collect(0)
    engine.seconds = 3600.0
    await asyncio.sleep(0.05)
    assert len(engine.running) == 4 * GROUP_SIZE
    await collector.settle()
    await asyncio.sleep(0.05)
    assert not engine.running
    engine.seconds, engine.version = 0.01, 1
    collector.weights_updated(1)
    output = await collector.collect(1)
    for sample in (sample for group in output.groups for sample in group):
        assert sample.response_tokens == ([3, 4] if partial else [4])
        assert sample.rollout_log_probs == ([-0.5, -1.5] if partial else [-1.5])  # old tokens keep theirs
        assert sample.weight_version == (0 if partial else 1)
        assert len(sample.prompt_tokens) == 4
    await collector.close()


async def test_an_engine_that_could_go_on_is_interrupted_where_older_tokens_take_no_gradient(
    example: Any,
) -> None:
    engine = Engine()
    settings = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "max_groups_in_flight": 4}
    collector, _ = make(example, engine, **settings)
    await collector.collect(0)
    engine.seconds = 3600.0
    await asyncio.sleep(0.05)
    await collector.settle()
    await asyncio.sleep(0.05)
    engine.seconds, engine.version = 0.01, 1
    collector.weights_updated(1)
    output = await collector.collect(1)
    assert {tuple(sample.loss_mask or ()) for group in output.groups for sample in group} == {(0, 1)}
    await collector.close()


def test_an_engine_that_cannot_go_on_refuses_to_be_asked_to(example: Any) -> None:
    for mode in ("retract", "in_place"):
        with pytest.raises(InputError, match=f"--pause-generation-mode {mode}: this engine cannot .* use abort"):
            make(example, Engine(keeps=False), pause_generation_mode=mode)


async def test_hooks_and_filter_see_every_group_once_and_under_its_own_rollout_id(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    judged: list[int] = []

    def hook(args: Any, sample: Sample, *, rollout_id: int, weight_version: int) -> None:
        assert rollout_id == sample.rollout_id
        assert weight_version == sample.weight_version
        seen.append((sample.index or 0, rollout_id))

    def keep_even(_args: Any, group: Group, **_: Any) -> bool:
        judged.append(group[0].group_index or 0)
        return (group[0].group_index or 0) % 2 == 0

    module = types.ModuleType("hooks_of_a_user")
    module.hook = hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hooks_of_a_user", module)
    engine = Engine()
    collector, _ = make(example, engine, dynamic_filter=keep_even, rollout_sample_hook_path=("hooks_of_a_user.hook",))
    outputs = [await collector.collect(step) for step in range(4)]
    assert all(group[0].group_index % 2 == 0 for output in outputs for group in output.groups)
    assert len(judged) == len(set(judged))
    indices = [index for index, _ in seen]
    assert len(indices) == len(set(indices)) == GROUP_SIZE * len(judged)
    await collector.close()


async def test_weights_that_an_engine_began_with_are_not_stale(example: Any) -> None:
    """--debug-rollout-only hands no weights over: the engine's version stays -1."""
    engine = Engine()
    engine.version = -1
    collector, _ = make(example, engine, max_weight_staleness=0)
    for step in range(3):
        output = await collector.collect(step)
        assert len(output.groups) == 4
        assert output.metrics["rollout/async/staleness/max"] == 0
        assert not output.metrics["rollout/async/groups_returned"]
    await collector.close()
