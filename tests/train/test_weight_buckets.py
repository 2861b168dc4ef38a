"""Tensors survive the way through buckets, whatever their dtype, shape and number."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.weight_sync.buckets import flatten_bucket, group_into_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_every_tensor_arrives_once_in_order_and_bit_for_bit(kinds: list, max_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"w{i}": torch.randint(0, 2, shape, generator=generator).to(dtype) for i, (dtype, shape) in enumerate(kinds)
    }
    arrived: dict[str, torch.Tensor] = {}
    for bucket in group_into_buckets(weights.items(), max_bytes):
        size = sum(t.numel() * t.element_size() for t in bucket.values())
        assert size <= max_bytes or len([t for t in bucket.values() if t.numel()]) == 1
        flat = flatten_bucket(bucket)
        flat.data.flags.writeable = False  # as an object store hands it out
        arrived |= flat.tensors()
    assert list(arrived) == list(weights)
    for name, tensor in weights.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_a_strided_tensor_is_flattened_by_value() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(flatten_bucket({"w": tensor}).tensors()["w"], tensor)


def test_buckets_hold_one_array() -> None:
    flat = flatten_bucket({"a": torch.ones(3), "b": torch.ones(5, dtype=torch.bfloat16)})
    assert flat.data.dtype == np.uint8
    assert flat.data.ndim == 1
