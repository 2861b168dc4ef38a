"""Forward and backward passes over micro-batches, through Megatron's schedules (with or without pipeline stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from train.megatron.micro_batch import MicroBatch

if TYPE_CHECKING:
    from torch.nn import Module

# Loss and whatever else is wanted from one micro-batch's logits [B or 1, S, local vocabulary].
LossFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]


def run_micro_batches(
    model: Module, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, backward: bool
) -> list[Any]:
    """What ``loss_function`` returned beside the loss, in order; empty on pipeline stages before the last.

    ``backward`` also accumulates gradients and reduces them over the data-parallel ranks.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].tokens.device)

    def forward_step(batches: Iterator[MicroBatch], model: Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro_batch = next(batches)
        logits = model(micro_batch.tokens, micro_batch.positions, None, packed_seq_params=_packing(micro_batch))

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, result = loss_function(micro_batch, logits)
            return value, no_tokens, result

        return logits, loss

    rows, width = micro_batches[0].tokens.shape
    with torch.set_grad_enabled(backward):
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=width,
            micro_batch_size=rows,
            forward_only=not backward,
        )
    return results


def _packing(micro_batch: MicroBatch) -> Any:
    """What Megatron's layers have to know about packed sequences; None for padded ones."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = micro_batch.bounds
    if bounds is None:
        return None
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
