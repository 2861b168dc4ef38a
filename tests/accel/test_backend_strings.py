"""Backend strings of torch.distributed are parsed, translated and completed, never searched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.backends.cuda import CudaAccelerator
from accel.backends.musa import MusaAccelerator
from accel.comm import (
    BackendSpec,
    is_accelerator_backend,
    normalize_backend,
    process_group_backend,
    weight_update_backend,
)
from accel.comm.backend_strings import OPTIONAL_BACKENDS

CPU, CUDA, MUSA = CpuAccelerator(), CudaAccelerator(), MusaAccelerator()


@pytest.mark.parametrize(
    ("accelerator", "text", "normal"),
    [
        (MUSA, "nccl", "mccl"),
        (MUSA, None, "mccl"),
        (MUSA, " MCCL ", "mccl"),
        (MUSA, "cpu:gloo,musa:mccl", "cpu:gloo,musa:mccl"),
        (MUSA, "musa:mccl", "cpu:gloo,musa:mccl"),
        (MUSA, "cpu:gloo", "cpu:gloo,musa:mccl"),
        (MUSA, "cuda:nccl , cpu:gloo", "cpu:gloo,musa:mccl"),
        (MUSA, "gloo", "gloo"),
        (MUSA, "cuda:nccl,musa:mccl", "cpu:gloo,musa:mccl"),
        (CUDA, "nccl", "nccl"),
        (CUDA, "cpu:gloo", "cpu:gloo,cuda:nccl"),
        (CPU, "nccl", "gloo"),
        (CPU, "cpu:gloo,cuda:nccl", "cpu:gloo"),
        (CPU, "auto", "gloo"),
    ],
)
def test_normalizing(accelerator, text, normal):
    assert normalize_backend(text, accelerator) == normal


@pytest.mark.parametrize(
    ("accelerator", "text", "says"),
    [
        (MUSA, "xnccl-debug", r"unknown backend 'xnccl-debug'.*known here are .*gloo, mccl"),
        (MUSA, "cpu:gloo,musa:ncccl", "unknown backend 'ncccl'"),
        (MUSA, "xpu:xccl", "names the device 'xpu'"),
        (CPU, "musa:mccl", "names the device 'musa'"),
        (MUSA, "cpu:gloo,cpu:gloo", "named twice"),
        (MUSA, "cpu:gloo,mccl", "has no device before it"),
        (MUSA, "cpu:", "is not a name"),
        (MUSA, "a b", "is not a name"),
        (MUSA, "cpu:nccl", r"gives 'cpu' the backend 'mccl', which carries musa tensors only: write cpu:gloo"),
        (CUDA, "cpu:nccl", "carries cuda tensors only: write cpu:gloo"),
        (MUSA, "cpu:mccl,musa:mccl", "carries musa tensors only"),
        (MUSA, "musa:gloo", "carries cpu, cuda tensors only: write musa:mccl"),
        (CPU, "mpi", "unknown backend 'mpi'"),
        (CPU, "fake", "unknown backend 'fake'"),
        (CPU, "ucc", "unknown backend 'ucc'"),
    ],
)
def test_refusing(accelerator, text, says):
    with pytest.raises(AcceleratorError, match=says):
        normalize_backend(text, accelerator)


def test_declared_backends():
    assert [process_group_backend(a) for a in (CPU, CUDA, MUSA)] == ["gloo", "nccl", "mccl"]
    assert [weight_update_backend(a) for a in (CPU, CUDA, MUSA)] == ["gloo", "nccl", "cpu:gloo,musa:mccl"]


@pytest.mark.parametrize(
    ("text", "is_its"),
    [
        ("mccl", True),
        ("nccl", True),
        ("cpu:gloo,musa:mccl", True),
        ("cuda:nccl", True),
        ("gloo", False),
        ("xnccl-debug", False),
        ("mccl2", False),
        ("cpu:gloo,musa:gloo", False),
        ("cpu:mccl", False),
    ],
)
def test_a_backend_is_the_accelerators_by_its_parts_and_not_by_a_substring(text, is_its):
    assert is_accelerator_backend(text, MUSA) is is_its


def test_two_names_of_one_device_must_agree(monkeypatch):
    monkeypatch.setitem(OPTIONAL_BACKENDS, "ucc", lambda: True)
    with pytest.raises(AcceleratorError, match="gives the device 'cpu' two backends, ucc and gloo"):
        normalize_backend("cpu:ucc,cuda:nccl", CPU)


words = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
pairs = st.dictionaries(words, words, min_size=1, max_size=4)
spaces = st.sampled_from(["", " "])


@given(pairs, spaces)
def test_what_is_written_is_read_back(by_device, space):
    text = f"{space},{space}".join(f"{device}{space}:{backend}" for device, backend in by_device.items())
    parsed = BackendSpec.parse(text.upper())
    assert dict(parsed.by_device) == by_device
    assert BackendSpec.parse(str(parsed)) == parsed


@given(
    st.sampled_from([CPU, CUDA, MUSA]), st.lists(st.sampled_from(["cpu:gloo", "cuda:nccl", "gloo", "nccl"]), min_size=1)
)
def test_normalizing_twice_changes_nothing(accelerator, parts):
    try:
        once = normalize_backend(",".join(parts), accelerator)
    except AcceleratorError:
        return
    assert normalize_backend(once, accelerator) == once


@given(words.filter(lambda word: "nccl" in word or "mccl" in word or len(word) > 3))
def test_only_the_exact_name_is_the_accelerators(word):
    assert is_accelerator_backend(word, MUSA) == (word in ("nccl", "mccl"))


@given(st.text(max_size=30))
def test_any_text_is_normalized_or_refused_in_words(text):
    message = None
    try:
        assert BackendSpec.parse(normalize_backend(text, MUSA)).backends()
    except AcceleratorError as error:
        message = str(error)
    assert message is None or repr(text) in message
