"""TRL's GRPOTrainer, set up for speed on the CPU and for the same algorithm as ours; the other side of two benchmarks.

What its users would choose for a small model on a CPU, and where a default is left for it:

- generation by ``transformers`` ``generate`` with its KV cache (the default without vLLM): all responses of a rollout
  in one batch;
- ``gradient_checkpointing=False`` (default: on, slower), ``bf16=False`` (default: on; fp32 is what we run), the fused
  AdamW that is the default;
- no evaluation, no saving, no logging, no reporting, no progress bar;
- ``beta=0``: no reference model; ``num_iterations=1``;
- ``per_device_train_batch_size`` responses an optimizer step, ``steps_per_generation`` optimizer steps a rollout, one
  forward and backward pass each: no gradient accumulation;
- the same clip range, entropy bonus, AdamW betas, weight decay, gradient clipping and token-mean loss (``dapo``:
  normalised over the tokens of the optimizer step), rewards scaled by each group's standard deviation;
- the same learning rate, warm-up and linear decay, counted in optimizer steps.

What it has no setting for stays: it keeps groups whose rewards are all equal (their advantage is 0).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Score = Callable[[list[str], list[str]], list[float]]


@dataclass(frozen=True)
class GrpoSettings:
    """One GRPO run in our terms: ``prompts`` x ``group_size`` responses a rollout, ``optimizer_steps`` on them."""

    prompts: int
    group_size: int
    optimizer_steps: int
    max_new_tokens: int
    min_new_tokens: int
    num_rollout: int
    seed: int
    lr: float = 1e-3
    lr_warmup_iters: int = 0
    lr_decay_style: str = "constant"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    entropy_coef: float = 0.0

    @property
    def responses(self) -> int:
        return self.prompts * self.group_size


def make_trainer(
    model_dir: Path, prompt_file: Path, settings: GrpoSettings, score: Score, callback: Any, output_dir: Path
) -> Any:
    """A GRPOTrainer on the model and prompts (JSON lines with ``prompt`` and ``label``) of ours."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in prompt_file.read_text(encoding="utf-8").splitlines()]
    prompts = Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows])
    fixed_length = settings.min_new_tokens == settings.max_new_tokens
    config = GRPOConfig(
        output_dir=str(output_dir),
        seed=settings.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings.responses // settings.optimizer_steps,
        steps_per_generation=settings.optimizer_steps,
        max_steps=settings.num_rollout * settings.optimizer_steps,
        num_generations=settings.group_size,
        max_completion_length=settings.max_new_tokens,
        generation_kwargs={"min_new_tokens": settings.min_new_tokens} if fixed_length else None,
        temperature=1.0,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.lr_decay_style,
        warmup_steps=settings.lr_warmup_iters * settings.optimizer_steps,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=settings.eps_clip,
        epsilon_high=settings.eps_clip_high,
        entropy_coef=settings.entropy_coef,
        loss_type="dapo",
        scale_rewards="group",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
        return score(completions, label)

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        callbacks=[callback],
    )
