"""The synchronous collector's sampling rounds, with an engine that answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from filters import DynamicFilterOutput
from rollout.collectors.sync import SyncCollector
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.protocol import FinishReason, GenerateRequest, GenerateResult
from rollout.rewards.exact_match import ExactMatchReward
from samples import DataSource
from samples.config import DataConfig
from samples.errors import InputError
from samples.sample import Group
from samples.tokenizer import load_tokenizer
from train.example import write_example


class AnsweringEngine:
    """Answers every request with the token that it began with."""

    weight_version = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        token = request.input_ids[0]
        return GenerateResult(request.request_id, [token], [-0.5], FinishReason.STOP, str(token), weight_version=0)


class Filter:
    """Keeps the groups whose index ``keeps`` says yes to, and counts what it sees."""

    def __init__(self, keeps: Any) -> None:
        self._keeps = keeps
        self.seen: list[int] = []

    def __call__(self, _args: Any, group: Group, **_: Any) -> DynamicFilterOutput:
        index = group[0].group_index
        assert index is not None
        self.seen.append(index)
        return DynamicFilterOutput(keep=self._keeps(index), reason="unlucky")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_example(tmp_path_factory.mktemp("example"), seed=0)


def collector(
    example: Any, keeps: Any, *, prompt_data: Path | None = None, **settings: Any
) -> tuple[SyncCollector, Filter]:
    config = RolloutConfig(rollout_batch_size=8, n_samples_per_prompt=2, rollout_max_response_len=2, **settings)
    data = DataConfig(
        prompt_data=(str(prompt_data or example.prompt_data),), label_key="label", skip_bad_rows=prompt_data is not None
    )
    source = DataSource(
        data, load_tokenizer(Path(example.hf_checkpoint)), seed=0, n_samples_per_prompt=2, max_prompt_len=16
    )
    dynamic_filter = Filter(keeps)
    made = SyncCollector(
        config,
        RewardConfig(),
        engine=AnsweringEngine(),  # type: ignore[arg-type]
        source=source,
        reward=ExactMatchReward(),
        dynamic_filter=dynamic_filter,
        seed=0,
        max_context_len=32,
    )
    return made, dynamic_filter


async def test_a_further_round_draws_what_is_missing_and_a_margin(example: Any) -> None:
    made, dynamic_filter = collector(example, lambda index: index != 3)
    output = await made.collect(0)
    # One of eight was dropped. One is missing: 8 / 7 draws are needed on average, 0.4 is their standard deviation.
    assert len(dynamic_filter.seen) == 8 + 2
    assert [group[0].group_index for group in output.groups] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert output.metrics["rollout/dynamic_filter/rounds"] == 2
    assert output.metrics["rollout/dynamic_filter/groups_surplus"] == 1


async def test_a_further_round_is_never_larger_than_the_first(example: Any) -> None:
    made, dynamic_filter = collector(example, lambda index: index == 0 or index >= 8)
    await made.collect(0)
    assert len(dynamic_filter.seen) == 8 + 8


async def test_nothing_kept_so_far_draws_a_whole_round_again(example: Any) -> None:
    made, dynamic_filter = collector(example, lambda index: index >= 16)
    output = await made.collect(0)
    assert len(dynamic_filter.seen) == 3 * 8
    assert len(output.groups) == 8


async def test_over_sampling_draws_as_many_in_every_round(example: Any) -> None:
    made, dynamic_filter = collector(example, lambda index: index % 4 == 0, over_sampling_batch_size=16)
    output = await made.collect(0)
    assert len(dynamic_filter.seen) == 2 * 16
    assert [group[0].group_index for group in output.groups] == list(range(0, 32, 4))


async def test_the_last_round_decides_by_the_policy_for_too_few_groups(example: Any) -> None:
    settings = {"max_sampling_rounds": 2}
    made, _ = collector(example, lambda index: index == 1, on_sampling_exhausted="shrink", **settings)
    assert [group[0].group_index for group in (await made.collect(0)).groups] == [1]
    made, _ = collector(example, lambda index: index == 1, on_sampling_exhausted="fallback", **settings)
    assert [group[0].group_index for group in (await made.collect(0)).groups] == list(range(8))
    made, _ = collector(example, lambda index: index == 1, on_sampling_exhausted="raise", **settings)
    with pytest.raises(InputError, match=r"--max-sampling-rounds 2 .* 15 dropped \(15 unlucky\)"):
        await made.collect(0)


async def test_prompts_of_surplus_groups_are_first_in_the_next_rollout(example: Any) -> None:
    made, dynamic_filter = collector(example, lambda index: True, over_sampling_batch_size=12)
    first = await made.collect(0)
    assert first.metrics["rollout/dynamic_filter/groups_surplus"] == 4
    dynamic_filter.seen.clear()
    second = await made.collect(1)
    assert dynamic_filter.seen == list(range(8, 20))
    assert [group[0].group_index for group in second.groups] == list(range(8, 16))
    for group in second.groups:
        assert [sample.index for sample in group] == [2 * group[0].group_index, 2 * group[0].group_index + 1]
        assert [(sample.response_length, sample.rollout_id) for sample in group] == [(1, 1)] * 2


async def test_rows_and_prompts_that_are_skipped_are_counted(example: Any, tmp_path: Path) -> None:
    rows = [line for line in example.prompt_data.read_text().splitlines() if line.strip()][:8]
    long = json.dumps(json.loads(rows[0]) | {"prompt": json.loads(rows[0])["prompt"] * 20})
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*rows, "nonsense", long]))
    made, _ = collector(example, lambda index: True, prompt_data=path)
    metrics = (await made.collect(0)).metrics
    metrics = (await made.collect(1)).metrics
    assert metrics["rollout/data/bad_rows"] == 1
    assert metrics["rollout/data/too_long_prompts"] == 1
