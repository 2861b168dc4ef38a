import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.batch import TrainBatch
from train.megatron.micro_batch import BatchOnDevice

# prompts and responses over two token ids, so that many sequences coincide or begin others
samples = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.lists(st.integers(0, 1), max_size=4)),
    min_size=1,
    max_size=12,
)


def batch_of(pairs: list[tuple[list[int], list[int]]], seed: int = 0) -> TrainBatch:
    random = np.random.default_rng(seed)
    lengths = [len(response) for _, response in pairs]
    return TrainBatch(
        tokens=[np.array(prompt + response, np.int32) for prompt, response in pairs],
        response_lengths=np.array(lengths, np.int32),
        loss_masks=[random.random(n) < 0.8 for n in lengths],
        rewards=np.zeros(len(pairs)),
        advantages=random.normal(size=len(pairs)).astype(np.float32),
        group_ids=np.zeros(len(pairs), np.int32),
        sample_indices=np.arange(len(pairs)),
        weight_versions=np.zeros(len(pairs), np.int32),
        temperature=1.0,
        rollout_log_probs=[-random.random(n).astype(np.float32) for n in lengths],
    )


@given(samples, st.integers(1, 4))
def test_every_trained_token_reads_the_logits_of_its_own_prefix(pairs, width_multiple):
    batch = batch_of(pairs)
    data = BatchOnDevice(batch, torch.device("cpu"), width_multiple)
    chosen = data.active
    weights = np.arange(len(pairs), dtype=np.float32)
    micro_batch = data.micro_batch(chosen, weights)
    rows, width = micro_batch.tokens.shape
    assert width % width_multiple == 0
    flat = micro_batch.rows.tolist()
    token = 0
    for i in chosen.tolist():
        prompt, response = pairs[i]
        for position in np.flatnonzero(batch.loss_masks[i]).tolist():
            row, column = divmod(flat[token], width)
            prefix = prompt + response[:position]
            assert micro_batch.tokens[row, : column + 1].tolist() == prefix
            assert micro_batch.targets[token] == response[position]
            assert micro_batch.weights[token] == weights[i]
            assert micro_batch.advantages[token] == batch.advantages[i]
            assert micro_batch.rollout_log_probs[token] == batch.rollout_log_probs[i][position]
            token += 1
    assert token == len(flat)
    assert rows <= max(len(chosen), 1)


@given(samples, st.integers(1, 4))
def test_packed_sequences_follow_one_another_without_padding(pairs, width_multiple):
    batch = batch_of(pairs)
    padded = BatchOnDevice(batch, torch.device("cpu"))
    packed = BatchOnDevice(batch, torch.device("cpu"), width_multiple, packed=True)
    chosen = packed.active
    weights = np.arange(len(pairs), dtype=np.float32)
    one, other = padded.micro_batch(chosen, weights), packed.micro_batch(chosen, weights)
    sequences, _ = packed._distinct(chosen)
    needed = sum(len(batch.tokens[i]) - 1 for i in sequences)
    rows, width = other.tokens.shape
    assert rows == 1
    assert width == -(-max(needed, 1) // width_multiple) * width_multiple
    starts = other.bounds[:-1]
    assert other.bounds[-1] == width
    sequence_of = torch.searchsorted(other.bounds, other.rows, right=True) - 1
    for token, row in enumerate(other.rows.tolist()):
        start = int(starts[sequence_of[token]])
        line, column = divmod(int(one.rows[token]), one.tokens.shape[1])
        prefix = one.tokens[line, : column + 1]
        assert torch.equal(other.tokens[0, start : row + 1], prefix)
        assert other.positions[0, start : row + 1].tolist() == list(range(row + 1 - start))
    for name in ("targets", "weights", "advantages", "rollout_log_probs"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@given(samples)
def test_no_sequence_is_run_that_begins_another(pairs):
    data = BatchOnDevice(batch_of(pairs), torch.device("cpu"))
    sequences, _ = data._distinct(data.active)
    inputs = [data.batch.tokens[i][:-1].tolist() for i in sequences]
    for a, first in enumerate(inputs):
        assert not any(a != b and second[: len(first)] == first for b, second in enumerate(inputs))


def test_a_micro_batch_without_samples_is_one_token_without_weight():
    data = BatchOnDevice(batch_of([([1], [0])]), torch.device("cpu"), width_multiple=2)
    empty = data.micro_batch(np.zeros(0, np.int64), np.zeros(1, np.float32))
    assert empty.tokens.tolist() == [[0, 0]]
    assert len(empty.rows) == len(empty.weights) == 0
