"""One rollout's training: Megatron through our trainer, against transformers with torch's AdamW doing the same.

    python -m benchmarks.train_step [--repeats N] [--threads N] [--json FILE]

Both take the same optimizer steps on the same samples: clipped surrogate with an entropy bonus, token mean, gradient
clipping, padded micro-batches of up to 128 sequences. The plain side has no ranks, no metrics but loss and gradient
norm, and a fused AdamW. Times are CPU seconds of alternating runs in one process; the first run of each is not counted.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from accel import select_accelerator
from accel.contract import Accelerator
from accel.modules import move_module
from benchmarks.harness import Spread, alternate, parser, ratios, report, table
from train.batch import TrainBatch
from train.batching import Indices, micro_batches, optimizer_steps
from train.config.run import RunConfig
from train.megatron.bootstrap import prepare_megatron
from train.megatron.trainer import MegatronTrainer


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the samples of one rollout."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    samples: int
    prompt: int
    response: int  # longest; lengths are spread evenly from half of it
    steps: int
    answers: int | None = None  # different responses to each prompt of 16 samples; None: all random


WORKLOADS = (
    Workload("built-in example, at its start", 64, 2, 14, samples=512, prompt=4, response=3, steps=4),
    Workload("built-in example, half-way", 64, 2, 14, samples=512, prompt=4, response=2, steps=4, answers=3),
    Workload("hidden 128, 4 layers", 128, 4, 512, samples=64, prompt=16, response=48, steps=1),
)


def write_model(work: Workload, directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=work.vocabulary, hidden_size=work.hidden, intermediate_size=4 * work.hidden,
        num_hidden_layers=work.layers, num_attention_heads=work.hidden // 32,
        num_key_value_heads=max(1, work.hidden // 64), head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


def make_batch(work: Workload) -> TrainBatch:
    random = np.random.default_rng(0)
    responses = random.integers(max(1, work.response // 2), work.response + 1, work.samples)
    tokens = [random.integers(0, work.vocabulary, work.prompt + n).astype(np.int32) for n in responses]
    if work.answers is not None:  # a policy that has learned the form of an answer gives few different ones
        responses[:] = work.response
        for start in range(0, work.samples, 16):
            answers = random.integers(0, work.vocabulary, (work.answers, work.prompt + work.response)).astype(np.int32)
            answers[:, : work.prompt] = answers[0, : work.prompt]
            tokens[start : start + 16] = answers[random.integers(0, work.answers, 16)]
    return TrainBatch(
        tokens=tokens,
        response_lengths=responses.astype(np.int32),
        loss_masks=[np.ones(n, np.bool_) for n in responses],
        rewards=np.zeros(work.samples),
        advantages=random.normal(size=work.samples).astype(np.float32),
        group_ids=np.zeros(work.samples, np.int32),
        sample_indices=np.arange(work.samples),
        weight_versions=np.zeros(work.samples, np.int32),
        temperature=1.0,
        rollout_log_probs=[np.full(n, -np.log(work.vocabulary), np.float32) for n in responses],
    )


class PlainTrainer:
    """transformers and torch alone."""

    def __init__(self, config: RunConfig, directory: Path, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = move_module(Qwen3ForCausalLM.from_pretrained(directory), device)
        adam = config.optimizer
        self.adam = torch.optim.AdamW(
            self.model.parameters(), lr=adam.lr, betas=(adam.adam_beta1, adam.adam_beta2), weight_decay=0.0, fused=True
        )

    def train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        lengths = np.array([len(tokens) for tokens in batch.tokens])
        steps = optimizer_steps(np.arange(len(batch)), self.config.batch, seed=0, rollout_id=rollout_id)
        losses, norms = [], []
        for samples in steps:
            total = int(batch.response_lengths[samples].sum())
            self.adam.zero_grad()
            loss = torch.zeros((), device=self.device)
            for part in micro_batches(samples, lengths, self.config.batch):
                share = self._loss(batch, part) / total
                share.backward()
                loss += share.detach()
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad))
            self.adam.step()
            losses.append(loss)
        return {"train/loss": float(torch.stack(losses).mean()), "train/grad_norm": float(torch.stack(norms).mean())}

    def _loss(self, batch: TrainBatch, part: Indices) -> torch.Tensor:
        assert batch.rollout_log_probs is not None
        sequences = [torch.from_numpy(batch.tokens[i]).long() for i in part]
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        old = torch.zeros(tokens.shape[0], tokens.shape[1] - 1)
        mask = torch.zeros_like(old)
        for row, i in enumerate(part):
            end = len(batch.tokens[i]) - 1
            old[row, end - int(batch.response_lengths[i]) : end] = torch.from_numpy(batch.rollout_log_probs[i])
            mask[row, end - int(batch.response_lengths[i]) : end] = 1.0
        tokens, old, mask = (part.to(self.device) for part in (tokens, old, mask))
        log_p = self.model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
        chosen = log_p.gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = ((chosen - old) * mask).exp()
        advantage = torch.from_numpy(batch.advantages[part]).to(self.device)[:, None]
        algorithm = self.config.algorithm
        high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - algorithm.eps_clip, 1 + high) * advantage)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -((surrogate + algorithm.entropy_coef * entropy) * mask).sum()


def seconds_of(
    train: Callable[[TrainBatch, int], dict[str, float]], batch: TrainBatch, rollout_id: int, accelerator: Accelerator
) -> float:
    """Processor time on the host, which a busy machine does not blur; the time that passed on any other device."""
    clock = time.perf_counter if accelerator.capabilities.exclusive_devices else time.process_time
    accelerator.synchronize()
    start = clock()
    train(batch, rollout_id)
    accelerator.synchronize()
    return clock() - start


def measure(work: Workload, repeats: int, accelerator: Accelerator) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_model(work, directory)
        config = RunConfig.model_validate(
            {
                "model": {"hf_checkpoint": scratch},
                "rollout": {"rollout_engine": "torch"},
                "algorithm": {"entropy_coef": 0.01, "eps_clip_high": 0.28, "use_rollout_logprobs": True},
                "optimizer": {"lr": 1e-3},
                "batch": {"num_steps_per_rollout": work.steps},
            }
        )
        batch = make_batch(work)
        ours = MegatronTrainer(config, accelerator, rank=0, world_size=1, store_path=None, hf_directory=directory)
        plain = PlainTrainer(config, directory, accelerator.device())
        try:
            first = {"accelrl": ours.train(batch, 0), "transformers": plain.train(batch, 0)}
            seconds = alternate(
                {
                    "accelrl": lambda repeat: seconds_of(ours.train, batch, repeat + 1, accelerator),
                    "transformers": lambda repeat: seconds_of(plain.train, batch, repeat + 1, accelerator),
                },
                repeats,
            )
        finally:
            ours.close()
    return {
        "workload": dataclasses.asdict(work),
        "tokens": int(sum(len(tokens) for tokens in batch.tokens)),
        "ms": {side: Spread.of([1000 * s for s in values]) for side, values in seconds.items()},
        "times_as_fast": ratios(seconds["transformers"], seconds["accelrl"]),
        # the same training, or the comparison means nothing
        "loss_difference": abs(first["accelrl"]["train/loss"] - first["transformers"]["train/loss"]),
    }


def main() -> None:
    command = parser(__doc__, repeats=15)
    command.add_argument("--accelerator", default="cpu", metavar="NAME", help="where both train (default: cpu)")
    command.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    args = command.parse_args()
    torch.set_num_threads(args.threads)
    accelerator = select_accelerator(args.accelerator)
    prepare_megatron(accelerator)
    results = [measure(work, args.repeats, accelerator) for work in WORKLOADS]
    rows = [
        (
            result["workload"]["name"],
            result["ms"]["accelrl"].text(1),
            result["ms"]["transformers"].text(1),
            result["times_as_fast"].text(),
            f"{result['loss_difference']:.1e}",
        )
        for result in results
    ]
    unit = "ms" if accelerator.capabilities.exclusive_devices else "cpu ms"
    header = (
        "one rollout's training",
        f"accelrl, {unit}",
        f"transformers + AdamW, {unit}",
        "times as fast",
        "loss apart by",
    )
    report("train_step", {"workloads": results}, table("Training on one rollout", header, rows), args.json)


if __name__ == "__main__":
    main()
