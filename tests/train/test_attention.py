"""Core attention against its formula in float64, and what it never makes: a score tensor, or scores of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.megatron import attention
from train.megatron.attention import CausalAttention

HEADS, WIDTH = 4, 16
KINDS = {
    "all heads": ({}, HEADS, WIDTH),
    "grouped": ({}, 2, WIDTH),
    "narrow values": ({"softmax_scale": 0.3}, HEADS, 8),
    "window": ({"window": 20}, 2, WIDTH),
    "sinks": ({"sinks": True}, 2, WIDTH),
    "window and sinks": ({"window": 20, "sinks": True}, 2, WIDTH),
}


def core(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> CausalAttention:
    config = SimpleNamespace(
        context_parallel_size=1, num_attention_heads=HEADS, tensor_model_parallel_size=1, params_dtype=dtype
    )
    made = CausalAttention(config, **settings)
    if made.softmax_offset is not None:
        torch.nn.init.normal_(made.softmax_offset, generator=torch.Generator().manual_seed(3))
    return made


def heads(length: int, groups: int, value_width: int, *batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((HEADS, WIDTH), (groups, WIDTH), (groups, value_width))
    return [torch.randn(length, *batch, *shape, generator=generator).requires_grad_() for shape in shapes]


def formula(made: CausalAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[s, b, heads, d] in, [s, b, heads * d] out, float64: scores, mask, sink, softmax, sum."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scale = made.scale if made.scale is not None else q.shape[-1] ** -0.5
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    age = torch.arange(len(q))[:, None] - torch.arange(len(k))
    seen = (age >= 0) & (age < (made.window or len(q)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if made.softmax_offset is not None:
        sinks = made.softmax_offset.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)


@pytest.mark.parametrize("length", [7, 20, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_formula(kind, length, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)  # several blocks, the last of them short
    settings, groups, value_width = KINDS[kind]
    made = core(settings)
    inputs = heads(length, groups, value_width, 2)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = made(*inputs, None), formula(made, *exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    learned = [] if made.softmax_offset is None else [made.softmax_offset]
    ours = torch.autograd.grad(out, [*inputs, *learned], direction)
    theirs = torch.autograd.grad(expected, [*exact, *learned], direction.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_see_themselves_alone(kind):
    settings, groups, value_width = KINDS[kind]
    made = core(settings)
    parts = [heads(length, groups, value_width) for length in (5, 30, 1)]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 35, 36], dtype=torch.int32))
    joined = made(*(torch.cat(same) for same in zip(*parts, strict=True)), None, packed)
    alone = [made(*(x[:, None] for x in part), None)[:, 0] for part in parts]
    torch.testing.assert_close(joined, torch.cat(alone), rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest storage that any operator, forward or backward, returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.nbytes = max([self.nbytes, *storages])
        return result


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_scores_is_made(kind, packed):
    """Memory grows with s, not with s x s: four times the length, about four times the largest tensor at the most."""
    settings, groups, value_width = KINDS[kind]
    made = core(settings)
    largest = []
    for length in (1024, 4096):
        inputs = heads(length, groups, value_width, *(() if packed else (1,)))
        bounds = SimpleNamespace(cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32)) if packed else None
        with LargestTensor() as seen:
            made(*inputs, None, bounds).sum().backward()
        largest.append(seen.nbytes)
        assert seen.nbytes < length * length  # not even a mask of a byte each
    assert largest[1] <= 4.2 * largest[0]
