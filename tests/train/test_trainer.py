import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from samples.errors import InputError
from tests.train.trainer_cases import PlainTraining, make_batch, make_trainer, run_config, write_model
from train.batch import TrainBatch
from train.megatron.optimizer import NonFiniteGradientError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


def train(config, batches: list[TrainBatch]) -> list[dict[str, float]]:
    trainer = make_trainer(config)
    try:
        return [trainer.train(batch, rollout_id) for rollout_id, batch in enumerate(batches)]
    finally:
        trainer.close()


def assert_equal_training(config, batches: list[TrainBatch], *, recompute: bool = False) -> None:
    plain = PlainTraining(config)
    expected = [plain.train(batch, i, recompute=recompute) for i, batch in enumerate(batches)]
    trainer = make_trainer(config)
    try:
        for rollout_id, (batch, values) in enumerate(zip(batches, expected, strict=True)):
            metrics = trainer.train(batch, rollout_id)
            assert metrics["train/loss"] == pytest.approx(np.mean(values["loss"]), rel=1e-5, abs=1e-6)
            assert metrics["train/grad_norm"] == pytest.approx(np.mean(values["grad_norm"]), rel=1e-5)
        weights = plain.model.state_dict()
        for name, tensor in trainer.export_weights():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=2e-6)
    finally:
        trainer.close()


def batches_of(model_dir: Path, count: int = 5, **kind) -> list[TrainBatch]:
    return [make_batch(model_dir, seed=seed, **kind) for seed in range(count)]


def test_five_rollouts_equal_plain_training_with_transformers(model_dir):
    config = run_config(
        model_dir,
        algorithm={"eps_clip_high": 0.28, "entropy_coef": 0.01, "kl_loss_coef": 0.1, "use_rollout_logprobs": True},
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "lr_warmup_iters": 2, "lr_decay_style": "cosine"},
        batch={"micro_batch_size": 3},
        job={"num_rollout": 5},
    )
    assert_equal_training(config, batches_of(model_dir))


def test_sequence_mean_and_several_steps_a_rollout_equal_plain_training(model_dir):
    config = run_config(
        model_dir,
        algorithm={"loss_aggregation": "sequence-mean", "kl_loss_coef": 0.1, "kl_loss_type": "k2"},
        batch={"num_steps_per_rollout": 3, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 40},
    )
    assert_equal_training(config, batches_of(model_dir, 2))


def test_old_log_probabilities_computed_by_the_trainer_equal_plain_training(model_dir):
    config = run_config(
        model_dir,
        algorithm={"use_rollout_logprobs": False, "eps_clip": 0.01},
        batch={"num_steps_per_rollout": 3},
        optimizer={"lr": 2e-3},
    )
    assert_equal_training(config, batches_of(model_dir, 2), recompute=True)


def test_ratios_are_taken_among_the_ids_that_sampling_kept(model_dir):
    config = run_config(model_dir, rollout={"rollout_top_p": 0.9}, batch={"num_steps_per_rollout": 2})
    assert_equal_training(config, batches_of(model_dir, 2, kept=True), recompute=True)


def test_samples_that_coincide_equal_plain_training(model_dir):
    config = run_config(model_dir, algorithm={"entropy_coef": 0.01}, batch={"num_steps_per_rollout": 2})
    assert_equal_training(config, batches_of(model_dir, 2, alike=True, samples=20))


def test_rollout_log_probabilities_of_another_distribution_are_refused(model_dir):
    config = run_config(model_dir, algorithm={"use_rollout_logprobs": True}, rollout={"rollout_top_p": 0.9})
    with pytest.raises(InputError, match="--use-rollout-logprobs with --rollout-top-p"):
        train(config, batches_of(model_dir, 1, kept=True))


def test_the_size_of_micro_batches_changes_nothing(model_dir):
    batch = make_batch(model_dir)
    cuts = [
        {},
        {"micro_batch_size": 1},
        {"micro_batch_size": 5},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 17},
    ]
    whole, *others = (
        train(run_config(model_dir, batch=cut, algorithm={"entropy_coef": 0.01}), [batch])[0] for cut in cuts
    )
    for metrics in others:
        assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
def test_rollout_and_trainer_agree_on_the_weights_that_sampled(model_dir, recompute: bool):
    config = run_config(
        model_dir, algorithm={"use_rollout_logprobs": not recompute}, batch={"num_steps_per_rollout": 3}
    )
    exact, noisy = make_batch(model_dir, noise=0.0), make_batch(model_dir, noise=0.3)
    (metrics,) = train(config, [exact])
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
    (metrics,) = train(config, [noisy])
    assert 0.1 < metrics["train/train_rollout_logprob_abs_diff"] < metrics["train/train_rollout_logprob_abs_diff_max"]


def test_metrics_count_what_was_trained(model_dir):
    batch = make_batch(model_dir)
    (metrics,) = train(run_config(model_dir, batch={"num_steps_per_rollout": 4}), [batch])
    assert metrics["train/tokens"] == sum(mask.sum() for mask in batch.loss_masks)
    assert metrics["train/num_samples"] == sum(mask.any() for mask in batch.loss_masks)
    assert metrics["train/optimizer_steps"] == 4
    assert metrics["train/lr"] == 1e-3
    assert 0 < metrics["train/clip_fraction"] < 1


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(model_dir):
    batch = make_batch(model_dir)
    batch.advantages[3] = np.nan
    trainer = make_trainer(run_config(model_dir))
    try:
        before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        with pytest.raises(NonFiniteGradientError, match="rollout 7, optimizer step 1 of 1 is nan"):
            trainer.train(batch, 7)
        for name, tensor in trainer.export_weights():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    finally:
        trainer.close()


def test_a_batch_without_a_trained_token_changes_nothing(model_dir):
    batch = make_batch(model_dir)
    batch = dataclasses.replace(batch, loss_masks=[np.zeros_like(mask) for mask in batch.loss_masks])
    (metrics,) = train(run_config(model_dir), [batch])
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["train/loss"] == 0


def test_token_ids_outside_the_vocabulary_are_refused(model_dir):
    batch = make_batch(model_dir)
    batch.tokens[2][0] = 29
    with pytest.raises(InputError, match="token id 29 is outside the model's vocabulary of 29"):
        train(run_config(model_dir), [batch])


def test_bfloat16_follows_fp32_loosely(model_dir):
    batches = batches_of(model_dir, 3)
    settings = {"algorithm": {"use_rollout_logprobs": True, "entropy_coef": 0.01}}
    exact = train(run_config(model_dir, **settings), batches)
    half = train(run_config(model_dir, **settings, model={"bf16": True}), batches)
    for a, b in zip(exact, half, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=0.1, abs=0.05)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=0.1)


def test_updates_too_small_for_bfloat16_add_up_in_the_master_weights(model_dir):
    batch = make_batch(model_dir)

    def start_and_move(bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
        trainer = make_trainer(run_config(model_dir, model={"bf16": bf16}, optimizer={"lr": 1e-4, "adam_eps": 1e-8}))
        try:
            start = torch.cat([tensor.flatten().float() for _, tensor in trainer.export_weights()])
            for _ in range(15):
                trainer.train(batch, 0)
            return start, torch.cat([tensor.flatten().float() for _, tensor in trainer.export_weights()]) - start
        finally:
            trainer.close()

    start, exact = start_and_move(bf16=False)
    _, half = start_and_move(bf16=True)
    # From 0.125 on, bfloat16 numbers are at least 1e-3 apart: no single step of 1e-4 can be seen in them.
    steady = (start.abs() > 0.125) & (exact.abs() > 1e-3)
    assert steady.sum() > 500
    assert (exact[steady] * half[steady] > 0).float().mean() > 0.6


def test_what_is_saved_is_a_transformers_model_of_the_trained_weights(model_dir, tmp_path):
    trainer = make_trainer(run_config(model_dir))
    try:
        trainer.train(make_batch(model_dir), 0)
        trainer.save_hf(tmp_path / "saved")
        weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    finally:
        trainer.close()
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    before = Qwen3ForCausalLM.from_pretrained(model_dir).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights.items())


PACKED = {"qkv_format": "thd", "num_steps_per_rollout": 2}
RECOMPUTED = [
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
]


@pytest.mark.parametrize("budget", [{}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}])
def test_packed_sequences_equal_plain_training(model_dir, budget):
    config = run_config(model_dir, batch=PACKED | budget, algorithm={"kl_loss_coef": 0.1})
    assert_equal_training(config, batches_of(model_dir, 2))


@pytest.mark.parametrize("recompute", RECOMPUTED, ids=str)
def test_recomputed_activations_equal_plain_training(model_dir, recompute):
    config = run_config(model_dir, recompute=recompute, batch={"num_steps_per_rollout": 2})
    assert_equal_training(config, batches_of(model_dir, 2))


@pytest.mark.parametrize(("recompute", "calls"), [({}, 1), (RECOMPUTED[0], 2), (RECOMPUTED[1], 2), (RECOMPUTED[3], 2)])
def test_a_recomputed_part_runs_once_more_in_the_backward_pass(model_dir, recompute, calls):
    trainer = make_trainer(run_config(model_dir, recompute=recompute))
    try:
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        trainer._model.decoder.layers[0].self_attention.core_attention.register_forward_hook(counted)
        trainer.train(make_batch(model_dir), 0)
        assert count == calls
    finally:
        trainer.close()


def test_experts_recomputed_equal_plain_training(tmp_path):
    write_model(tmp_path, mixture=True)
    config = run_config(
        tmp_path, recompute={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    )
    batches = batches_of(tmp_path, 2)
    plain = PlainTraining(config)
    for rollout_id, metrics in enumerate(train(config, batches)):
        values = plain.train(batches[rollout_id], rollout_id)
        assert metrics["train/loss"] == pytest.approx(values["loss"][0], rel=1e-5, abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(values["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize(
    ("recompute", "mixture", "message"),
    [
        ({"recompute_granularity": "full", "recompute_num_layers": 3}, False, "--recompute-num-layers 3: a pipeline"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, False, "has no experts; use mlp"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, True, "has experts; use moe"),
    ],
)
def test_recomputation_that_does_not_fit_the_model_is_refused(tmp_path, recompute, mixture, message):
    directory = write_model(tmp_path, mixture=mixture)
    with pytest.raises(InputError, match=message):
        make_trainer(run_config(directory, recompute=recompute))
