"""Megatron's distributed optimizer around a model: gradients, clipping, one step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samples.errors import RunError
from train.config.run import RunConfig
from train.megatron.optimizer_state import ParameterState
from train.optim import StatelessAdam

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel


class NonFiniteGradientError(RunError):
    """The gradient is not finite. The weights were not touched."""


class PolicyOptimizer:
    """AdamW over a model whose weights are loaded: master weights, gradients and moments in fp32, sharded over the
    data-parallel ranks; with ``--optimizer stateless-adam`` there are no moments. Norms and biases (parameters of one
    dimension) take no weight decay, as Megatron has it."""

    def __init__(self, model: GPTModel, config: RunConfig) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        # A micro-batch's loss is its share of the whole batch's already: gradients add up, over micro-batches and over
        # data-parallel ranks, and nothing is to be divided by a number of tokens afterwards.
        model.config.calculate_per_token_loss = True
        model.config.finalize_model_grads_func = lambda models, _, **groups: finalize_model_grads(models, **groups)
        self._settings = config.optimizer
        self.model: DistributedDataParallel = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model,
        )
        adam = config.optimizer
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=adam.lr,
                min_lr=adam.min_lr,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.adam_beta1,
                adam_beta2=adam.adam_beta2,
                adam_eps=adam.adam_eps,
                clip_grad=adam.clip_grad,
                bf16=config.model.bf16,
                params_dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
                use_distributed_optimizer=True,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        for group in self._optimizer.param_groups:
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        if adam.optimizer == "stateless-adam":
            self._keep_no_moments()
        else:
            self._use_fused_kernel()

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, learning_rate: float, where: str) -> float:
        """One step on the summed gradients; the norm before clipping, over all parameters. Collective.

        Raises NonFiniteGradientError, naming ``where``, before any weight changes.
        """
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"the gradient norm in {where} is {norm}; the weights were left as they were. Lower --lr or "
                "--clip-grad, or look at that step's rewards and log-probabilities"
            )
        if self._settings.clip_grad > 0:
            for optimizer in self._chained():
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, self._settings.clip_grad, norm)
        self._optimizer.step_with_ready_grads()
        return norm

    def state_tensors(self) -> list[torch.Tensor]:
        """What the optimizer keeps on this rank, gradients included; some are views of the model's buffers."""
        found: list[torch.Tensor] = []
        for optimizer in self._chained():
            if optimizer.is_stub_optimizer:
                continue
            for group in optimizer.optimizer.param_groups:
                for weight in group["params"]:
                    found.append(weight)
                    if weight.grad is not None:
                        found.append(weight.grad)
            for state in optimizer.optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return found

    def parameter_state(self) -> ParameterState:
        """fp32 weights and moments by parameter, for checkpoints."""
        return ParameterState(self._chained())

    def _chained(self) -> list[Any]:
        from megatron.core.optimizer import ChainedOptimizer

        return (
            self._optimizer.chained_optimizers if isinstance(self._optimizer, ChainedOptimizer) else [self._optimizer]
        )

    def _keep_no_moments(self) -> None:
        """Put StatelessAdam where Megatron made its Adam, over the same groups; no step was taken, so no state is lost.

        Megatron reads the groups (learning rate, decay, its own marks) and calls ``step``; the moments of its Adam it
        asks for in checkpoints of its own only, and those here are ``train.checkpoint``'s.
        """
        for optimizer in self._chained():
            if optimizer.is_stub_optimizer:
                continue
            groups = optimizer.optimizer.param_groups
            # The groups hold views of the gradient buffers, which a constructor refuses, so they are put in afterwards.
            stateless = StatelessAdam([torch.nn.Parameter(torch.zeros(()))])
            stateless.param_groups = groups
            for group in groups:
                for name, value in stateless.defaults.items():
                    group.setdefault(name, value)
            optimizer.optimizer = stateless

    def _use_fused_kernel(self) -> None:
        """Let torch's AdamW use its one-kernel step where the device has it: Megatron leaves it at a loop in Python."""
        for optimizer in self._chained():
            adamw = optimizer.optimizer
            parameters = optimizer.get_parameters()
            if not isinstance(adamw, torch.optim.AdamW) or not parameters:
                continue
            try:
                torch.optim.AdamW([torch.nn.Parameter(parameters[0].detach()[:1])], fused=True)
            except RuntimeError:  # torch: no fused kernel for this device
                continue
            for group in adamw.param_groups:
                group["fused"] = True
                group["foreach"] = False
