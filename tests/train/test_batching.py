import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.batching import balance, micro_batches, optimizer_steps, plan_step
from train.config.sections import BatchConfig

lengths_of_samples = st.lists(st.integers(2, 50), min_size=1, max_size=40).map(np.array)
batch_configs = st.one_of(
    st.builds(BatchConfig, micro_batch_size=st.one_of(st.none(), st.integers(1, 9))),
    st.builds(
        BatchConfig,
        use_dynamic_batch_size=st.just(True),
        max_tokens_per_gpu=st.integers(1, 300),
        qkv_format=st.sampled_from(["bshd", "thd"]),
    ),
)


def sizes(count: int, **batch: int) -> list[int]:
    return [len(step) for step in optimizer_steps(np.arange(count), BatchConfig(**batch), seed=0, rollout_id=0)]


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (10, {}, [10]),
        (10, {"num_steps_per_rollout": 4}, [3, 3, 2, 2]),
        (3, {"num_steps_per_rollout": 4}, [1, 1, 1]),
        (12, {"global_batch_size": 4}, [4, 4, 4]),
        (13, {"global_batch_size": 4}, [5, 4, 4]),
        (3, {"global_batch_size": 4}, [3]),
        (64, {"global_batch_size": 32, "num_steps_per_rollout": 2}, [32, 32]),
        (30, {"global_batch_size": 32, "num_steps_per_rollout": 2}, [30]),
        (0, {"num_steps_per_rollout": 2}, []),
    ],
)
def test_samples_are_split_evenly_into_steps_and_none_is_empty(count: int, batch: dict, expected: list[int]):
    assert sizes(count, **batch) == expected


def test_the_deal_to_steps_depends_on_seed_and_rollout_only():
    def deal(seed: int, rollout_id: int) -> list[list[int]]:
        config = BatchConfig(num_steps_per_rollout=2)
        return [s.tolist() for s in optimizer_steps(np.arange(20), config, seed=seed, rollout_id=rollout_id)]

    assert deal(1, 5) == deal(1, 5)
    assert deal(1, 5) != deal(1, 6)
    assert deal(1, 5) != deal(2, 5)
    assert sorted(i for step in deal(1, 5) for i in step) == list(range(20))


@given(lengths_of_samples, st.integers(1, 6))
def test_ranks_get_all_samples_once_and_close_token_counts(lengths: np.ndarray, ranks: int):
    parts = balance(np.arange(len(lengths)), lengths, ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    loads = [int(lengths[part].sum()) for part in parts]
    assert max(loads) - min(loads) <= lengths.max()


@given(lengths_of_samples, batch_configs, st.integers(1, 5))
def test_every_rank_has_equally_many_micro_batches_and_no_sample_is_lost(
    lengths: np.ndarray, config: BatchConfig, ranks: int
):
    plan = plan_step(np.arange(len(lengths)), lengths, config, ranks)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))


@given(lengths_of_samples, st.integers(1, 300))
def test_dynamic_micro_batches_keep_their_token_budget_padding_included(lengths: np.ndarray, budget: int):
    config = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=budget)
    for batch in micro_batches(np.arange(len(lengths)), lengths, config):
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= budget


@given(lengths_of_samples, st.integers(1, 300))
def test_packed_micro_batches_are_as_full_as_their_token_budget_allows(lengths: np.ndarray, budget: int):
    config = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=budget, qkv_format="thd")
    batches = micro_batches(np.arange(len(lengths)), lengths, config)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert len(batch) == 1 or lengths[batch].sum() <= budget
        assert following is None or lengths[batch].sum() + lengths[following[0]] > budget


def test_micro_batches_hold_neighbours_in_length():
    lengths = np.array([5, 9, 2, 9, 5, 2])
    batches = micro_batches(np.arange(6), lengths, BatchConfig(micro_batch_size=2))
    assert [b.tolist() for b in batches] == [[1, 3], [0, 4], [2, 5]]
