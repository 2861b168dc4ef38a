import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from train import losses
from train.losses import (
    VocabShard,
    clipped_surrogate,
    kept_token_log_probs,
    kl_estimate,
    token_log_probs,
    token_weights,
)

WHOLE = VocabShard(0)


def case(seed: int = 0, rows: int = 9, vocabulary: int = 12, tokens: int = 5, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    row = torch.randperm(rows, generator=generator)[:tokens]
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return logits, row, target, torch.randn(2, tokens, generator=generator)


def reference(logits: torch.Tensor, row: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, temperature: float):
    """log-probabilities, entropies and d(weighted sum)/d(logits) by autograd in float64."""
    exact = logits.double().requires_grad_()
    log_p = (exact[row] / temperature).log_softmax(1)
    chosen = log_p.gather(1, target[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    (weights[0].double() @ chosen + weights[1].double() @ entropy).backward()
    return chosen.detach(), entropy.detach(), exact.grad


@pytest.mark.parametrize("chunk", [1 << 24, 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_log_probabilities_entropy_and_gradient_match_float64(temperature: float, chunk: int, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    logits, row, target, weights = case()
    chosen, entropy, gradient = reference(logits, row, target, weights, temperature)
    logits.requires_grad_()
    got, got_entropy = token_log_probs(logits, row, target, temperature=temperature, shard=WHOLE)
    (weights[0] @ got + weights[1] @ got_entropy).backward()
    torch.testing.assert_close(got.double(), chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e38, 1e38, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.arange(2), torch.tensor([0, 1]), temperature=1.0, shard=WHOLE)
    assert log_probs.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_worked_on_in_fp32():
    logits, row, target, weights = case()
    half = logits.bfloat16()
    chosen, entropy, gradient = reference(half, row, target, weights, 1.0)
    half.requires_grad_()
    got, got_entropy = token_log_probs(half, row, target, temperature=1.0, shard=WHOLE)
    (weights[0] @ got + weights[1] @ got_entropy).backward()
    torch.testing.assert_close(got.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half.grad.double(), gradient, rtol=1e-2, atol=1e-3)


def test_a_micro_batch_without_tokens_gives_a_gradient_of_zero():
    logits = torch.randn(1, 5, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    log_probs, entropy = token_log_probs(logits, nothing, nothing, temperature=1.0, shard=WHOLE)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == (0,)
    assert not logits.grad.any()


def kept_case(target: torch.Tensor, vocabulary: int):
    """Ids that top-p might have left: the target and some others; nothing for the last token."""
    generator = torch.Generator().manual_seed(1)
    ids, tokens = [], []
    for token in range(len(target) - 1):
        others = torch.randperm(vocabulary, generator=generator)[: 2 + token]
        kept = torch.cat([target[token, None], others[others != target[token]]])
        ids.append(kept)
        tokens.append(torch.full_like(kept, token))
    return torch.cat(ids), torch.cat(tokens)


def kept_reference(logits, row, target, weights, ids, tokens, temperature):
    exact = logits.double().requires_grad_()
    banned = torch.full((len(row), logits.shape[1]), -torch.inf, dtype=torch.float64)
    banned[tokens, ids] = 0.0
    banned[-1] = 0.0
    chosen = (exact[row] / temperature + banned).log_softmax(1).gather(1, target[:, None]).squeeze(1)
    chosen = chosen * torch.tensor([1.0] * (len(row) - 1) + [0.0])
    (weights[0].double() @ chosen).backward()
    return chosen.detach(), exact.grad


def test_log_probabilities_among_kept_ids_match_float64():
    logits, row, target, weights = case()
    ids, tokens = kept_case(target, logits.shape[1])
    expected, gradient = kept_reference(logits, row, target, weights, ids, tokens, 0.7)
    logits.requires_grad_()
    got = kept_token_log_probs(logits, row, target, ids, tokens, temperature=0.7, shard=WHOLE)
    (weights[0] @ got).backward()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def _tensor_parallel_rank(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
    logits, row, target, weights = case()
    ids, tokens = kept_case(target, logits.shape[1])
    width = logits.shape[1] // 2
    shard = VocabShard(rank * width, torch.distributed.group.WORLD)
    own = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = token_log_probs(own, row, target, temperature=0.7, shard=shard)
    (weights[0] @ log_probs + weights[1] @ entropy).backward()
    kept_own = own.detach().clone().requires_grad_()
    kept = kept_token_log_probs(kept_own, row, target, ids, tokens, temperature=0.7, shard=shard)
    (weights[0] @ kept).backward()
    torch.save((log_probs, entropy, own.grad, kept, kept_own.grad), f"{results}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_split_vocabulary_gives_the_whole_ones_values_and_gradients(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_tensor_parallel_rank, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    ranks = [torch.load(tmp_path / f"out.{rank}") for rank in range(2)]
    logits, row, target, weights = case()
    chosen, entropy, gradient = reference(logits, row, target, weights, 0.7)
    kept, kept_gradient = kept_reference(logits, row, target, weights, *kept_case(target, logits.shape[1]), 0.7)
    for log_probs, own_entropy, _, own_kept, _ in ranks:
        torch.testing.assert_close(log_probs.double(), chosen, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own_entropy.double(), entropy, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_kept.double(), kept, rtol=1e-6, atol=1e-6)
    for position, expected in ((2, gradient), (4, kept_gradient)):
        whole = torch.cat([rank[position] for rank in ranks], 1)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_surrogate_is_ppos_with_an_upper_clip_of_its_own():
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1], requires_grad=True)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    loss, ratio, clipped = clipped_surrogate(log_ratio, torch.zeros(5), advantage, eps_low=0.2, eps_high=0.3)
    r = np.exp([0.5, 0.5, -0.5, -0.5, 0.1])
    np.testing.assert_allclose(loss.detach(), [-1.3 * 2, r[1] * 2, -r[2] * 2, 0.8 * 2, -r[4]], rtol=1e-6)
    np.testing.assert_allclose(ratio, r, rtol=1e-6)
    assert clipped.tolist() == [True, False, False, True, False]
    loss.sum().backward()
    np.testing.assert_allclose(log_ratio.grad, [0, r[1] * 2, -r[2] * 2, 0, -r[4]], rtol=1e-6)


def test_an_overflowing_ratio_with_advantage_zero_is_no_nan():
    loss, _, _ = clipped_surrogate(
        torch.tensor([0.0, 0.0]), torch.tensor([-500.0, 500.0]), torch.zeros(2), eps_low=0.2, eps_high=0.2
    )
    assert loss.abs().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_match_their_closed_forms_and_carry_gradient(estimator: str):
    policy = torch.tensor([-1.0, -2.0, -0.1], requires_grad=True)
    reference_log_probs = torch.tensor([-1.5, -0.3, -0.1])
    estimate = kl_estimate(policy, reference_log_probs, estimator)
    log_r = np.array([-0.5, 1.7, 0.0])
    r = np.exp(log_r)
    values = {"k1": -log_r, "k2": log_r**2 / 2, "k3": r - 1 - log_r}
    slopes = {"k1": np.ones(3), "k2": -log_r, "k3": 1 - r}
    np.testing.assert_allclose(estimate.detach(), values[estimator], rtol=1e-5, atol=1e-7)
    estimate.sum().backward()
    np.testing.assert_allclose(policy.grad, slopes[estimator], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimates_average_to_the_divergence(estimator: str):
    p, q = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(1)
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_estimate(p, q, estimator)).sum(), expected)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_token_weights_are_means_over_tokens_or_sequences(counts: list[int]):
    values = [np.arange(count) + 1.0 for count in counts]
    by_token, by_sequence = (
        sum(float(w) * v.sum() for w, v in zip(token_weights(np.array(counts), how), values, strict=True))
        for how in ("token-mean", "sequence-mean")
    )
    full = [v for v in values if len(v)]
    np.testing.assert_allclose(by_token, np.concatenate(values).mean() if full else 0.0, rtol=1e-5)
    np.testing.assert_allclose(by_sequence, np.mean([v.mean() for v in full]) if full else 0.0, rtol=1e-5)
