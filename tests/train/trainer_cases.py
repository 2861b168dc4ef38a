"""A tiny model, a recorded batch, and the same training written plainly with transformers and torch's AdamW."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from accel import select_accelerator
from train.batch import TrainBatch
from train.batching import optimizer_steps
from train.config.run import RunConfig
from train.learning_rate import learning_rate
from train.megatron.bootstrap import prepare_megatron
from train.megatron.trainer import MegatronTrainer

VOCABULARY = 29  # odd: two tensor-parallel ranks have to pad it


def write_model(directory: Path, *, tied: bool = False, mixture: bool = False, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config_class, model_class, particular = (
        (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16})
        if mixture
        else (Qwen3Config, Qwen3ForCausalLM, {})
    )
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2,
        **particular,
    )  # fmt: skip
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def run_config(directory: Path, **sections: dict) -> RunConfig:
    # With Adam's usual eps, rounding errors of gradients near zero become whole steps, whatever the gradient's scale.
    sections["optimizer"] = {"lr": 1e-3, "adam_eps": 1e-4} | sections.get("optimizer", {})
    sections["rollout"] = {"rollout_engine": "torch"} | sections.get("rollout", {})
    sections["model"] = {"hf_checkpoint": str(directory)} | sections.get("model", {})
    return RunConfig.model_validate(sections)


def make_trainer(config: RunConfig, *, rank: int = 0, world_size: int = 1, store: str | None = None) -> MegatronTrainer:
    accelerator = select_accelerator(os.environ.get("ACCELRL_ACCELERATOR", "cpu"))
    accelerator.set_device(rank % accelerator.device_count())
    prepare_megatron(accelerator)
    return MegatronTrainer(
        config, accelerator, rank=rank, world_size=world_size, store_path=store,
        hf_directory=Path(str(config.model.hf_checkpoint)),
    )  # fmt: skip


def log_probs_of(model: torch.nn.Module, batch: TrainBatch, i: int) -> torch.Tensor:
    """log softmax(logits / temperature) at the response tokens of sample i, [response, vocabulary]."""
    tokens = torch.from_numpy(batch.tokens[i]).long()
    logits = model(tokens[None]).logits[0, -1 - int(batch.response_lengths[i]) : -1]
    return (logits / batch.temperature).log_softmax(-1)


def response_of(batch: TrainBatch, i: int) -> torch.Tensor:
    return torch.from_numpy(batch.tokens[i][-int(batch.response_lengths[i]) :]).long()


def make_batch(
    directory: Path, *, seed: int = 0, samples: int = 12, noise: float = 0.3, kept: bool = False, alike: bool = False
) -> TrainBatch:
    """Random samples of different lengths; rollout log-probabilities are the model's own plus noise.

    ``alike``: two token ids only, so that many samples are equal or begin others.
    """
    random = np.random.default_rng(seed)
    responses = random.integers(1, 9, samples)
    ids = 2 if alike else VOCABULARY
    responses = np.minimum(responses, 3) if alike else responses
    prompts = np.ones_like(responses) if alike else random.integers(1, 7, samples)
    tokens = [random.integers(0, ids, p + n).astype(np.int32) for p, n in zip(prompts, responses, strict=True)]
    masks = [random.random(n) < 0.8 for n in responses]
    masks[0][:] = False  # a sample without gradient
    batch = TrainBatch(
        tokens=tokens, response_lengths=responses.astype(np.int32), loss_masks=masks, rewards=np.zeros(samples),
        advantages=random.normal(size=samples).astype(np.float32), group_ids=np.zeros(samples, np.int32),
        sample_indices=np.arange(samples), weight_versions=np.zeros(samples, np.int32), temperature=0.8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    rollout, kept_ids = [], []
    for i, n in enumerate(responses):
        response = response_of(batch, i)
        with torch.no_grad():
            chosen = log_probs_of(model, batch, i).gather(1, response[:, None])[:, 0].numpy()
        rollout.append((chosen + noise * random.normal(size=n)).astype(np.float32))
        kept_ids.append(
            [np.unique(np.append(random.integers(0, VOCABULARY, 6), t)).astype(np.int32) for t in response.tolist()]
        )
    return TrainBatch(**vars(batch) | {"rollout_log_probs": rollout, "kept_token_ids": kept_ids if kept else None})


class PlainTraining:
    """GRPO with transformers, one sample at a time: no padding, no parallelism, gradients by autograd alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(str(config.model.hf_checkpoint)).eval()
        self.reference = copy.deepcopy(self.model)
        adam = config.optimizer
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": adam.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(adam.adam_beta1, adam.adam_beta2), eps=adam.adam_eps)

    def train(self, batch: TrainBatch, rollout_id: int, *, recompute: bool = False) -> dict[str, list[float]]:
        config = self.config
        active = np.flatnonzero([mask.any() for mask in batch.loss_masks])
        steps = optimizer_steps(active, config.batch, seed=config.job.seed, rollout_id=rollout_id)
        old = [self._chosen(self.model, batch, i)[0].detach() for i in range(len(batch))] if recompute else None
        losses, norms = [], []
        for samples in steps:
            self.adam.zero_grad()
            loss = self._loss(batch, samples.tolist(), old)
            loss.backward()
            clip = config.optimizer.clip_grad or float("inf")
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip).item())
            losses.append(loss.item())
            for group in self.adam.param_groups:
                group["lr"] = learning_rate(rollout_id, config.optimizer, config.job.num_rollout)
            self.adam.step()
        return {"loss": losses, "grad_norm": norms}

    def _chosen(
        self, model: torch.nn.Module, batch: TrainBatch, i: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities the ratio compares, those of the whole distribution, and entropies; [response] each."""
        log_p = log_probs_of(model, batch, i)
        response = response_of(batch, i)
        whole = log_p.gather(1, response[:, None])[:, 0]
        ratio = whole
        if batch.kept_token_ids is not None:
            ratio = torch.stack([
                row[torch.from_numpy(kept).long()].log_softmax(0)[int(np.flatnonzero(kept == token)[0])]
                for row, kept, token in zip(log_p, batch.kept_token_ids[i], response.tolist(), strict=True)
            ])  # fmt: skip
        return ratio, whole, -(log_p.exp() * log_p).sum(1)

    def _correction(self, difference: torch.Tensor, batch: TrainBatch, i: int) -> torch.Tensor:
        """Bounded exp(old - rollout) of each response token, or of the sum or mean over those that are trained."""
        a = self.config.algorithm
        trained = difference[torch.from_numpy(batch.loss_masks[i])]
        if a.tis_level != "token":
            difference = (trained.sum() if a.tis_level == "sequence" else trained.mean()).expand_as(difference)
        ratio = difference.exp()
        inside = ((ratio >= a.tis_clip_low) & (ratio <= a.tis_clip)).float()
        return ratio * inside if a.tis_mode == "mask" else ratio.clamp(a.tis_clip_low, a.tis_clip)

    def _loss(self, batch: TrainBatch, samples: Sequence[int], old: list[torch.Tensor] | None) -> torch.Tensor:
        a = self.config.algorithm
        per_sample = []
        for i in samples:
            new, whole, entropy = self._chosen(self.model, batch, i)
            assert batch.rollout_log_probs is not None
            before = torch.from_numpy(batch.rollout_log_probs[i]) if old is None else old[i]
            ratio, advantage = (new - before).exp(), float(batch.advantages[i])
            high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - a.eps_clip, 1 + high) * advantage)
            if a.use_tis:
                loss = loss * self._correction(before - torch.from_numpy(batch.rollout_log_probs[i]), batch, i)
            loss = loss - a.entropy_coef * entropy
            if a.kl_loss_coef:
                with torch.no_grad():
                    log_r = self._chosen(self.reference, batch, i)[1]
                log_r = log_r - whole
                loss = (
                    loss
                    + a.kl_loss_coef * {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[a.kl_loss_type]
                )
            per_sample.append(loss[torch.from_numpy(batch.loss_masks[i])])
        if a.loss_aggregation == "token-mean":
            return torch.cat(per_sample).mean()
        return torch.stack([loss.mean() for loss in per_sample]).mean()
