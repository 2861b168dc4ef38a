"""One rank of the trainer: a batch in, new weights out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from accel.contract import Accelerator
from accel.modules import move_module
from rollout.engines.choice import choose_engine
from samples.errors import InputError
from train.batch import TrainBatch
from train.batching import Indices, optimizer_steps, plan_step
from train.checkpoint.manifest import Checkpoint, TrainerState
from train.checkpoint.released import SavedTrainer
from train.checkpoint.trainer_state import (
    TrainerSnapshot,
    load_optimizer_state,
    save_trainer_state,
    snapshot_trainer_state,
)
from train.config.run import RunConfig
from train.learning_rate import learning_rate
from train.losses import token_weights
from train.megatron.forward import run_micro_batches
from train.megatron.groups import TrainerGroups
from train.megatron.memory import TAGS, Tag, TrainerMemory, held_tensors
from train.megatron.micro_batch import BatchOnDevice, MicroBatch
from train.megatron.model import build_model, load_hf_config
from train.megatron.models import family_of
from train.megatron.objective import TokenScores, policy_objective, rollout_difference, score_tokens
from train.megatron.optimizer import PolicyOptimizer
from train.megatron.parallel import join_ranks, leave_ranks, vocab_shard
from train.megatron.tally import Tally
from train.megatron.weights.exporting import iter_hf_weights
from train.megatron.weights.loading import LoadReport, load_hf_weights
from train.megatron.weights.saving import save_hf

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from train.megatron.models.family import ModelFamily


class MegatronTrainer:
    """Trains a Hugging Face model with Megatron-Core. ``prepare_megatron`` comes first in every process.

    All methods but ``close`` are collective: every rank calls them, in the same order and with the same arguments.

    Gradients are the whole function's. transformers gives its embedding ``padding_idx=pad_token_id``, which leaves that
    row out; here it gets its gradient where a response holds the token, so that the gradient norm is then larger.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        *,
        rank: int,
        world_size: int,
        store_path: str | None,
        hf_directory: Path,
        resume: Checkpoint | SavedTrainer | None = None,
    ) -> None:
        self._config = config
        self._hf_directory = hf_directory
        self._device = accelerator.device()
        self._hf_config = load_hf_config(hf_directory, config.model.trust_remote_code)
        self._family = family_of(self._hf_config)
        self._groups = TrainerGroups(accelerator, reload=config.parallel.reload_process_groups)
        self.weights_read = LoadReport(tensors=0, bytes_read=0)
        self._placement = join_ranks(config, accelerator, rank=rank, world_size=world_size, store_path=store_path)
        try:
            self._model = self._load(*((resume.directory, "--load") if resume else (hf_directory, "--hf-checkpoint")))
            self._optimizer = PolicyOptimizer(self._model, config)
            if resume is not None:
                state, steps = self._optimizer.parameter_state(), resume.optimizer_steps
                load_optimizer_state(*self._described(), state, resume.directory, steps)
            self._reference: GPTModel | None = None
            if config.algorithm.kl_loss_coef > 0:
                reference = config.model.ref_load
                self._reference = self._load(
                    Path(reference) if reference else hf_directory, "--ref-load" if reference else "--hf-checkpoint"
                ).requires_grad_(False)
        except BaseException:
            leave_ranks(accelerator, failed=True)
            raise
        models = [self._model] if self._reference is None else [self._model, self._reference]
        self._memory = TrainerMemory(accelerator, config.offload, lambda: held_tensors(self._optimizer, models))

    def train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        """Take the optimizer steps of one rollout; the metrics, the same on every rank.

        Every rank gets the whole batch and takes its own share. A loss is normalised over its whole optimizer step, so
        neither the number of ranks nor the size of micro-batches changes it.
        """
        with self._memory.present(*TAGS), self._groups.turn(give_back=False):  # the hand-over of the weights is next
            return self._train(batch, rollout_id)

    def _train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        packed = self._config.batch.qkv_format == "thd"
        data = BatchOnDevice(batch, self._device, self._width_multiple(), packed=packed)
        self._check_token_ids(data.highest_token_id())
        plan = optimizer_steps(data.active, self._config.batch, seed=self._config.job.seed, rollout_id=rollout_id)
        steps = [self._own_share(samples, data) for samples in plan]
        corrected = self._config.algorithm.use_tis
        tokens = int(data.trained_tokens.sum())
        tally = Tally(self._device, samples=len(data.active), tokens=tokens, corrected=corrected)
        recompute = not self._takes_rollout_log_probs(batch)
        if batch.rollout_log_probs is not None and steps:
            tally.measured_tokens = tally.tokens if recompute else int(data.trained_tokens[plan[0]].sum())
        self._score_beforehand(steps, batch.temperature, recompute, tally)
        rate = learning_rate(rollout_id, self._config.optimizer, self._config.job.num_rollout)
        for number, step in enumerate(steps):
            where = f"rollout {rollout_id}, optimizer step {number + 1} of {len(steps)}"
            tally.grad_norms.append(
                self._optimizer_step(step, batch.temperature, rate, where, tally, first=number == 0)
            )
        return tally.metrics(rate, self._placement)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, on every rank; valid until the next optimizer step."""
        with self._memory.present("weights"), self._groups.turn(give_back=True):  # the rollout is next
            yield from iter_hf_weights(self._model, self._family, self._hf_config)

    def save_hf(self, directory: Path) -> None:
        """Write a directory that transformers loads, with the tokenizer of the model that training began from."""
        with self._memory.present("weights"), self._groups.turn():
            save_hf(self._model, self._family, self._hf_config, directory, self._hf_directory)

    def save_state(self, directory: Path) -> TrainerState:
        """Write weights and optimizer state into ``directory``, which exists, for ``resume`` of a later trainer.

        Rank 0 writes, and gets to know the files. Raises CheckpointWriteError there when it could not.
        """
        with self._memory.present(*TAGS), self._groups.turn():
            state = self._optimizer.parameter_state()
            return save_trainer_state(*self._described(), state, directory, self._hf_directory)

    def snapshot_state(self) -> TrainerSnapshot | None:
        """What ``save_state`` would write now, in host memory; None on all ranks but the first."""
        with self._memory.present(*TAGS), self._groups.turn():
            state = self._optimizer.parameter_state()
            return snapshot_trainer_state(*self._described(), state, self._hf_directory)

    def release_memory(self, tags: Sequence[Tag] = TAGS) -> None:
        """Give the device memory of these back and return once it is free; not collective.

        Whatever is called meanwhile takes what it needs, and gives it back again afterwards. Raises MemoryNotFreed.
        """
        if "optimizer" in tags and "optimizer" not in self._memory.released:
            self._optimizer.zero_grad()  # the next step begins with it anyway, and zeroes need no copy
        self._memory.release(tags)

    def resume_memory(self, tags: Sequence[Tag] = TAGS) -> None:
        """Have it back as it was. Raises MemoryNotFreed when there is no room for it."""
        self._memory.resume(tags)

    def close(self, update_groups: Sequence[Callable[[], None]] = ()) -> None:
        """End the process groups, so that another trainer can begin in this process; ``update_groups`` first, which
        close what is shared with engines."""
        try:
            self._groups.close(update_groups)
        finally:
            self._memory.close()

    def _described(self) -> tuple[GPTModel, ModelFamily, Any]:
        """The model, and what says how its parameters are called outside."""
        return self._model, self._family, self._hf_config

    def _load(self, directory: Path, source: str) -> GPTModel:
        model = move_module(build_model(self._hf_config, self._config), self._device)
        self.weights_read += load_hf_weights(model, self._family, self._hf_config, directory, source)
        if self._placement.pipeline_size > 1:
            model.config.variable_seq_lengths = True  # micro-batches are only as wide as their longest sequence
        return model

    def _width_multiple(self) -> int:
        return self._placement.tensor_size if self._config.parallel.sequence_parallel else 1

    def _check_token_ids(self, highest: int) -> None:
        if highest >= self._hf_config.vocab_size:
            raise InputError(
                f"token id {highest} is outside the model's vocabulary of {self._hf_config.vocab_size}: the tokenizer "
                f"in --hf-checkpoint {self._hf_directory} does not belong to its model"
            )

    def _takes_rollout_log_probs(self, batch: TrainBatch) -> bool:
        """Whether the rollout's log-probabilities stand for the old policy's; else a forward pass computes them."""
        wanted = self._config.algorithm.use_rollout_logprobs
        if self._config.algorithm.use_tis:
            _check_correctable(batch)
            return False
        if wanted is None:
            engine, _ = choose_engine(self._config.rollout)
            exact = engine == "torch" and not self._config.model.bf16
            # Where older weights sampled, only the rollout knows what they gave.
            rollout = self._config.rollout
            older = rollout.rollout_mode != "sync" or rollout.partial_rollout or rollout.keep_surplus_groups
            return (exact or older) and batch.kept_token_ids is None and batch.rollout_log_probs is not None
        if wanted and batch.kept_token_ids is not None:
            raise InputError(
                "--use-rollout-logprobs with --rollout-top-p or --rollout-top-k: the rollout's log-probabilities are "
                "of the whole distribution, not of the one that was sampled from; leave one of them out"
            )
        if wanted and batch.rollout_log_probs is None:
            raise InputError("--use-rollout-logprobs is on but the batch holds no rollout log-probabilities")
        return wanted

    def _own_share(self, samples: Indices, data: BatchOnDevice) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of one optimizer step, with the weights of the whole step."""
        weights = np.zeros(len(data.lengths), np.float32)
        weights[samples] = token_weights(data.trained_tokens[samples], self._config.algorithm.loss_aggregation)
        shares = plan_step(samples, data.lengths, self._config.batch, self._placement.data_size)
        return [data.micro_batch(part, weights) for part in shares[self._placement.data_rank]]

    def _score_beforehand(
        self, steps: list[list[MicroBatch]], temperature: float, recompute: bool, tally: Tally
    ) -> None:
        """Fill in old and reference log-probabilities. The first step's old policy is the current one."""
        for micro_batch in (m for step in steps for m in step):
            micro_batch.old_log_probs = None if recompute else micro_batch.rollout_log_probs
        later = [micro_batch for step in steps[1:] for micro_batch in step]
        if recompute and later:
            for micro_batch, scores in zip(later, self._scores(self._model, later, temperature), strict=False):
                micro_batch.old_log_probs = scores.ratio_log_probs
                tally.add_differences([rollout_difference(scores, micro_batch)])
        if self._reference is not None and steps:
            every = [micro_batch for step in steps for micro_batch in step]
            for micro_batch, scores in zip(every, self._scores(self._reference, every, temperature), strict=False):
                micro_batch.reference_log_probs = scores.log_probs

    def _scores(self, model: GPTModel, micro_batches: list[MicroBatch], temperature: float) -> list[TokenScores]:
        """Forward pass only; empty on pipeline stages before the last."""

        def score(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, TokenScores]:
            return logits.new_zeros(()), score_tokens(logits, micro_batch, temperature, vocab_shard(logits.shape[-1]))

        return run_micro_batches(model, micro_batches, score, backward=False)

    def _optimizer_step(
        self, step: list[MicroBatch], temperature: float, rate: float, where: str, tally: Tally, *, first: bool
    ) -> float:
        def loss(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
            scores = score_tokens(logits, micro_batch, temperature, vocab_shard(logits.shape[-1]))
            value, sums = policy_objective(scores, micro_batch, self._config.algorithm)
            return value, (sums, rollout_difference(scores, micro_batch) if first else None)

        self._optimizer.zero_grad()
        results = run_micro_batches(self._optimizer.model, step, loss, backward=True)
        tally.add_sums(sums for sums, _ in results)
        tally.add_differences(difference for _, difference in results if difference is not None)
        return self._optimizer.step(rate, where)


def _check_correctable(batch: TrainBatch) -> None:
    if batch.rollout_log_probs is None:
        raise InputError("--use-tis compares with the rollout's log-probabilities, and the batch holds none")
    if batch.kept_token_ids is not None:
        raise InputError(
            "--use-tis with kept token ids in the batch: tokens were sampled from a restricted distribution, and the "
            "rollout's log-probabilities are of the whole one; leave one of them out"
        )
