"""Tensors survive the way through buckets, whatever their dtype, shape and number; checksums tell when they do not."""

from __future__ import annotations

import zlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.weight_sync.buckets import pack
from train.weight_sync.checksums import bytes_of, copy_with_checksum, digest, fast_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


class Reserve:
    """A buffer that moves whenever it grows, and that is overwritten when another bucket begins."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.largest = 0

    def __call__(self, used: int, nbytes: int) -> torch.Tensor:
        grown = torch.full((max(nbytes, self.buffer.numel()),), 0xAA, dtype=torch.uint8)
        grown[:used] = self.buffer[:used]
        self.buffer = grown
        self.largest = max(self.largest, nbytes)
        return grown


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_every_tensor_arrives_once_in_order_and_bit_for_bit(kinds: list, max_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"w{i}": torch.randint(0, 2, shape, generator=generator).to(dtype) for i, (dtype, shape) in enumerate(kinds)
    }
    reserve = Reserve()
    arrived: dict[str, torch.Tensor] = {}
    for bucket in pack(iter(weights.items()), max_bytes, reserve):
        tensors = bucket.unpack(reserve.buffer)
        assert bucket.nbytes <= max_bytes or len(tensors) == 1 or bucket.nbytes <= 16
        for packed in bucket.tensors:
            assert packed.offset % 16 == 0
            assert packed.checksum == fast_checksum(bytes_of(tensors[packed.name].clone()))
        arrived |= {name: tensor.clone() for name, tensor in tensors.items()}
    assert list(arrived) == list(weights)
    for name, tensor in weights.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    largest = max((tensor.nbytes for tensor in weights.values()), default=0)
    assert reserve.largest <= max(max_bytes, largest + 15)


def test_a_strided_tensor_is_packed_by_value() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    reserve = Reserve()
    (bucket,) = pack(iter([("w", tensor)]), 1000, reserve)
    assert torch.equal(bucket.unpack(reserve.buffer)["w"], tensor)


@given(st.integers(1, 40_000), st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_a_changed_byte_changes_the_checksum(size: int, place: int, change: int) -> None:
    raw = torch.arange(size, dtype=torch.int64).mul(2654435761).bitwise_right_shift(7).to(torch.uint8)
    before = fast_checksum(raw)
    raw[place % size] ^= change
    assert fast_checksum(raw) != before


@given(st.integers(0, 3_000_000), st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=20, deadline=None)
def test_copying_gives_the_bytes_and_their_checksum_by_its_definition(
    size: int, dtype: torch.dtype, strided: bool
) -> None:
    count = size // dtype.itemsize
    source = torch.arange(2 * count, dtype=torch.int64).mul(2654435761).bitwise_right_shift(7).to(dtype)
    source = source[::2] if strided else source[:count]
    target = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    checksum = copy_with_checksum(target, source)
    assert torch.equal(target, bytes_of(source))
    whole = target.numel() // 8192 * 8192
    block = target[:whole].view(torch.int64).view(-1, 1024)
    crc = zlib.crc32(str(target.numel()).encode())
    for part in (block.sum(0), block.sum(1), target[whole:]):
        crc = zlib.crc32(part.numpy().tobytes(), crc)
    assert checksum == fast_checksum(target) == f"{crc:08x}"


def test_swapped_pieces_and_cut_off_zeros_change_the_checksum() -> None:
    rows = torch.arange(5 * 1024, dtype=torch.int64).view(5, 1024)
    before = fast_checksum(bytes_of(rows))
    assert fast_checksum(bytes_of(rows.flip(0))) != before
    assert fast_checksum(bytes_of(rows.flip(1))) != before
    assert fast_checksum(bytes_of(torch.zeros(10))) != fast_checksum(bytes_of(torch.zeros(11)))


def test_a_digest_knows_names_and_not_the_order() -> None:
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    assert digest({"a": "1", "b": "2"}) != digest({"a": "2", "b": "1"})
    assert digest({"a": "1"}) != digest({"a": "1", "b": "2"})
