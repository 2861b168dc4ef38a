"""The correction for what the rollout sampled from: by hand in float64, by finite differences, and in training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from samples.errors import InputError
from tests.train.trainer_cases import PlainTraining, make_batch, make_trainer, run_config, write_model
from train.config.checks import validate
from train.config.sections import AlgorithmConfig
from train.config.settings import build
from train.importance import importance_correction
from train.megatron.micro_batch import MicroBatch
from train.megatron.objective import SUMS, TokenScores, policy_objective

SAMPLE_OF = [0, 0, 0, 2, 2, 3, 3, 3, 3]  # sample 1 has no trained token


def by_hand(old, rollout, level, mode, low, high):
    """Weights, ratios and where a bound decided, one sample at a time."""
    weights, ratios, outside = [], [], []
    for place, sample in enumerate(SAMPLE_OF):
        mates = [old[i] - rollout[i] for i, other in enumerate(SAMPLE_OF) if other == sample]
        of = {"token": old[place] - rollout[place], "sequence": math.fsum(mates), "geometric": np.mean(mates)}[level]
        ratio = math.exp(of)
        beyond = not low <= ratio <= high
        ratios.append(ratio)
        outside.append(beyond)
        weights.append((0.0 if mode == "mask" else min(max(ratio, low), high)) if beyond else ratio)
    return weights, ratios, outside


def random_log_probs(seed):
    chance = np.random.default_rng(seed)
    old = -chance.exponential(1.5, len(SAMPLE_OF))
    return old, old - chance.normal(0, 0.8, len(SAMPLE_OF))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "low", "high"), [("clip", 0.0, 2.0), ("clip", 0.7, 1.4), ("mask", 0.5, 2.0)])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_those_by_hand(level, mode, low, high, seed):
    old, rollout = random_log_probs(seed)
    found = importance_correction(
        torch.from_numpy(old),
        torch.from_numpy(rollout),
        torch.tensor(SAMPLE_OF),
        4,
        level=level,
        mode=mode,
        low=low,
        high=high,
    )
    weights, ratios, outside = by_hand(old, rollout, level, mode, low, high)
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.ratios, torch.tensor(ratios, dtype=torch.float64), rtol=1e-12, atol=0)
    assert found.outside.tolist() == outside
    assert not found.weights.requires_grad


def test_a_difference_that_would_overflow_gives_a_finite_weight_and_no_tokens_give_none():
    nothing = torch.zeros(0)
    kinds = {"level": "sequence", "mode": "clip", "low": 0.0, "high": 2.0}
    assert importance_correction(nothing, nothing, torch.zeros(0, dtype=torch.int64), 0, **kinds).weights.shape == (0,)
    far = importance_correction(
        torch.tensor([0.0]), torch.tensor([-300.0]), torch.tensor([0]), 1, **kinds | {"mode": "mask"}
    )
    assert far.ratios.isfinite().all()
    assert far.weights.tolist() == [0.0]


def objective_case(level, mode, *, with_old):
    """A micro-batch of the samples above in float64, and its settings."""
    old, rollout = (torch.from_numpy(values) for values in random_log_probs(5))
    generator = torch.Generator().manual_seed(0)
    count = len(SAMPLE_OF)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch(
        tokens=nothing,
        positions=nothing,
        rows=torch.arange(count),
        targets=nothing,
        weights=torch.rand(count, generator=generator, dtype=torch.float64),
        advantages=torch.randn(count, generator=generator, dtype=torch.float64),
        rollout_log_probs=rollout,
        sample_of=torch.tensor(SAMPLE_OF),
        num_samples=4,
        old_log_probs=old if with_old else None,
    )
    algorithm = AlgorithmConfig(use_tis=True, tis_level=level, tis_mode=mode, tis_clip=1.5, tis_clip_low=0.6)
    new = old + 0.05 * torch.randn(count, generator=generator, dtype=torch.float64)  # within the clip of 0.2
    return batch, algorithm, (new if with_old else old), old, rollout


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_the_gradient_is_the_losss_with_the_weights_as_constants_by_finite_differences(level, mode):
    batch, algorithm, new, old, rollout = objective_case(level, mode, with_old=True)
    weights = torch.tensor(by_hand(old, rollout, level, mode, 0.6, 1.5)[0], dtype=torch.float64)

    def loss(log_probs):
        return policy_objective(TokenScores(log_probs, torch.zeros_like(log_probs), log_probs), batch, algorithm)[0]

    by_formula = -(batch.weights * weights * batch.advantages * (new - old).exp()).sum()
    assert loss(new).item() == pytest.approx(by_formula.item(), rel=1e-12)
    at = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at)
    for token in range(len(new)):
        step = torch.zeros_like(new)
        step[token] = 1e-6
        slope = (loss(new + step) - loss(new - step)).item() / 2e-6
        assert gradient[token].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_where_the_current_policy_is_the_old_one_no_gradient_flows_through_the_weights():
    """exp(current - rollout) moves with the current policy; taken as a constant it does not."""
    batch, algorithm, now, old, rollout = objective_case("token", "clip", with_old=False)
    at = now.clone().requires_grad_()
    loss, sums = policy_objective(TokenScores(at, torch.zeros_like(at), at), batch, algorithm)
    (gradient,) = torch.autograd.grad(loss, at)
    weights, ratios, outside = by_hand(old, rollout, "token", "clip", 0.6, 1.5)
    expected = -batch.weights * torch.tensor(weights, dtype=torch.float64) * batch.advantages
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    measured = dict(zip(SUMS, sums.tolist(), strict=True))
    assert measured["tis_ratio"] == pytest.approx(sum(ratios))
    assert measured["tis_weight"] == pytest.approx(sum(weights))
    assert measured["tis_clipped"] == sum(outside)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "kind", [{}, {"tis_level": "sequence", "tis_clip_low": 0.5}, {"tis_level": "geometric", "tis_mode": "mask"}]
)
def test_training_equals_plain_training_with_transformers(model_dir, kind):
    config = run_config(
        model_dir, algorithm={"use_tis": True, "tis_clip": 1.2} | kind, batch={"num_steps_per_rollout": 2}
    )
    batch = make_batch(model_dir)
    plain, trainer = PlainTraining(config), make_trainer(config)
    try:
        for rollout_id in range(2):
            expected = plain.train(batch, rollout_id, recompute=True)
            metrics = trainer.train(batch, rollout_id)
            assert metrics["train/loss"] == pytest.approx(np.mean(expected["loss"]), rel=1e-5, abs=1e-6)
            assert metrics["train/grad_norm"] == pytest.approx(np.mean(expected["grad_norm"]), rel=1e-5)
            assert 0 < metrics["train/tis_clip_fraction"] < 1
            assert metrics["train/tis_weight_mean"] < metrics["train/tis_ratio_mean"]
    finally:
        trainer.close()


def test_without_the_flag_there_are_no_such_metrics_and_a_batch_that_cannot_be_corrected_is_refused(model_dir):
    trainer = make_trainer(run_config(model_dir))
    try:
        assert not [key for key in trainer.train(make_batch(model_dir), 0) if "tis" in key]
    finally:
        trainer.close()
    trainer = make_trainer(run_config(model_dir, algorithm={"use_tis": True}))
    try:
        with pytest.raises(InputError, match="--use-tis with kept token ids"):
            trainer.train(make_batch(model_dir, kept=True), 0)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_tis": True, "tis_clip_low": 2.0}, "--tis-clip-low 2 is not below --tis-clip 2"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "would always be 1; leave one out"),
        ({"use_tis": True, "rollout_top_p": 0.9}, "--rollout-top-p 0.9 with --use-tis"),
        ({"use_tis": True, "rollout_top_k": 5}, "--rollout-top-k 5 with --use-tis"),
        ({"tis_clip": 3.0}, "--tis-clip 3.0: nothing is corrected"),
        ({"tis_level": "sequence"}, "--tis-level sequence: nothing is corrected"),
    ],
)
def test_settings_that_nothing_would_come_of_are_refused(values, said):
    with pytest.raises(InputError) as caught:
        validate(build({"rollout_engine": "torch"} | values))
    assert said in str(caught.value)
