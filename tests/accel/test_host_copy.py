"""Memory that leaves a device comes back bit for bit, under the tensors that were there."""

from __future__ import annotations

import os

import pytest
import torch

from accel import select_accelerator
from accel.backends.cpu import CpuAccelerator, resident_memory
from accel.contract import Capabilities
from accel.errors import AcceleratorError
from accel.memory.host_copy import HostCopy, bytes_in, storages_of

MIB = 1 << 20


class Device(CpuAccelerator):
    """Host memory that is freed and taken like a device's."""

    capabilities = Capabilities(exclusive_devices=False)


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["cpu", "device"])
def accelerator(request):
    return select_accelerator("cpu") if request.param == "cpu" else Device()


def test_ties_views_and_marks_hold(accelerator, tmp_path):
    buffer = values(3 * MIB // 4 + 5)
    view = torch.nn.Parameter(buffer[10:1010].view(10, 100))
    view.sequence_parallel = True
    tied = torch.nn.Linear(4, 4)
    other = torch.nn.Linear(4, 4)
    other.weight = tied.weight
    tensors = [buffer, view, tied.weight, other.weight, torch.zeros(MIB), torch.arange(7)]
    before = [tensor.detach().clone() for tensor in tensors]
    copy = HostCopy(accelerator, tmp_path)
    nbytes = copy.release(tensors)
    assert nbytes == sum(storage.nbytes() for storage in storages_of(before)) - 4000 - 64  # what is shared counts once
    assert copy.resume() == nbytes
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    assert view.sequence_parallel
    assert view.data_ptr() == buffer[10:].data_ptr()
    assert other.weight is tied.weight
    buffer[10] = 5.0
    assert view[0, 0] == 5.0


def test_again_and_again_with_more_to_move_each_time(accelerator, tmp_path):
    tensors = [values(1000)]
    copy = HostCopy(accelerator, tmp_path)
    for round_ in range(4):
        before = [tensor.clone() for tensor in tensors]
        copy.release(tensors)
        with pytest.raises(RuntimeError, match="released already"):
            copy.release(tensors)
        copy.resume()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
        tensors.append(values(50_000 * (round_ + 1), round_))
        tensors[0].add_(1.0)
    assert copy.resume() == 0
    copy.close()


def test_every_bit_pattern_comes_back(accelerator, tmp_path):
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]).repeat(5000)
    copy = HostCopy(accelerator, tmp_path)
    bits = bytes_in(odd.untyped_storage()).clone()
    copy.release([odd])
    copy.resume()
    assert torch.equal(bytes_in(odd.untyped_storage()), bits)


def test_a_devices_memory_is_freed():
    tensor = values(1000)
    copy = HostCopy(Device())
    copy.release([tensor])
    assert tensor.untyped_storage().nbytes() == 0
    assert copy.nbytes == 4000


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not say what is resident")
def test_the_hosts_memory_leaves_the_process_for_a_file_without_a_name(tmp_path):
    tensor = values(32 * MIB // 4)
    tensor.numpy()  # after this torch would not free the storage
    copy = HostCopy(select_accelerator("cpu"), tmp_path)
    before = resident_memory()
    copy.release([tensor])
    assert before - resident_memory() > 28 * MIB
    assert os.listdir(tmp_path) == []
    copy.resume()
    assert torch.equal(tensor, values(32 * MIB // 4))
    copy.release([tensor, zeros := torch.zeros(8 * MIB)])
    assert before - resident_memory() > 28 * MIB
    copy.resume()
    assert not zeros.any()


def test_where_there_is_no_room_everything_stays(tmp_path):
    tensor = values(5000)
    copy = HostCopy(select_accelerator("cpu"), tmp_path / "missing")
    with pytest.raises(AcceleratorError, match="missing: no room for 20480 bytes"):
        copy.release([tensor])
    assert torch.equal(tensor, values(5000))
    assert copy.resume() == 0
