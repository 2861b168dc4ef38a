"""Run by test_emulation.py in a process of its own with ACCELRL_EMULATE_ASYNC=1: copies complete late."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # teaches the pickler about tensors

from accel import select_accelerator

accelerator = select_accelerator("musa", emulate=True)
M0, M1 = torch.device("musa:0"), torch.device("musa:1")


def to_host(values: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def test_a_copy_to_the_host_is_poison_until_its_device_is_synchronised():
    device = torch.arange(4.0, device=M0)
    host = to_host(device)
    assert host.isnan().all()
    device.zero_()  # behind the copy on the stream, so not in it
    accelerator.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_integers_and_booleans_are_wrong_until_then_too():
    for values in (torch.arange(4), torch.tensor([True, False])):
        host = to_host(values.to(M0))
        assert not (host == values).any()
        accelerator.synchronize()
        assert torch.equal(host, values)


def test_to_cpu_without_blocking_is_poison_too():
    host = torch.ones(3, device=M0).to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.musa.current_stream().synchronize()
    assert host.tolist() == [1, 1, 1]


def test_an_event_behind_the_copy_completes_it_and_one_before_it_does_not():
    before, behind = torch.musa.Event(), torch.musa.Event()
    before.record()
    host = to_host(torch.ones(2, device=M0))
    behind.record()
    before.synchronize()
    assert host.isnan().all()
    behind.synchronize()
    assert host.tolist() == [1, 1]


def test_a_query_says_no_first_and_yes_then():
    host = to_host(torch.ones(2, device=M0))
    event = torch.musa.Event()
    event.record()
    assert not event.query()
    assert event.query()
    assert host.tolist() == [1, 1]


def test_a_blocking_copy_and_item_wait_for_their_stream():
    device = torch.ones(2, device=M0)
    host = to_host(device)
    device.cpu()
    assert host.tolist() == [1, 1]
    host = to_host(device)
    device.sum().item()
    assert host.tolist() == [1, 1]


def test_a_kernel_on_the_same_stream_comes_behind_a_copy_to_the_device():
    device = torch.arange(4.0).pin_memory().to(M0, non_blocking=True)
    assert (device + 1).tolist() == [1, 2, 3, 4]


def test_a_kernel_on_another_stream_sees_poison_unless_it_waits():
    source, side = torch.ones(4).pin_memory(), torch.musa.Stream()
    device = source.to(M0, non_blocking=True)
    with torch.musa.stream(side):
        assert (device + 0).isnan().all()
        side.wait_stream(torch.musa.default_stream())
        assert (device + 0).tolist() == [1] * 4


def test_the_host_may_not_reuse_a_pinned_source_early():
    source = torch.ones(4).pin_memory()
    device = source.to(M0, non_blocking=True)
    source.zero_()
    assert device.tolist() == [0] * 4  # as hardware may have it
    pageable = torch.ones(4)
    device = pageable.to(M0, non_blocking=True)
    pageable.zero_()
    assert device.tolist() == [1] * 4  # staged before the call returned


def test_a_stream_that_waited_carries_the_copies_it_waited_for():
    side = torch.musa.Stream()
    host = to_host(torch.ones(2, device=M0))
    side.wait_stream(torch.musa.current_stream())
    side.synchronize()
    assert host.tolist() == [1, 1]


def test_lists_of_copies_are_late_too():
    hosts = [torch.empty(2, pin_memory=True) for _ in range(2)]
    torch._foreach_copy_(hosts, [torch.ones(2, device=M0), torch.zeros(2, device=M0)], non_blocking=True)
    assert all(host.isnan().all() for host in hosts)
    accelerator.synchronize()
    assert [host.tolist() for host in hosts] == [[1, 1], [0, 0]]


def test_there_is_no_peer_access():
    assert not torch.musa.can_device_access_peer(0, 1)
    assert torch.ones(2, device=M0).to("musa:1").tolist() == [1, 1]  # staged through the host


def test_a_copy_to_another_device_is_poison_on_a_stream_that_waited_for_neither_device():
    source, side = torch.arange(4.0, device=M0), torch.musa.Stream(M1)
    there = source.to(M1, non_blocking=True)
    with torch.musa.stream(side):
        assert (there + 0).isnan().all()
        side.wait_stream(torch.musa.current_stream(M0))
        assert (there + 0).tolist() == [0, 1, 2, 3]


def test_kernels_on_both_devices_own_streams_come_behind_a_copy_between_them():
    source = torch.ones(4, device=M0)
    there = source.to(M1, non_blocking=True)
    source.zero_()
    assert there.tolist() == [1] * 4
    back = torch.zeros(4, device=M0).copy_(there + 1, non_blocking=True)
    assert (back + 1).tolist() == [3] * 4


def test_a_copy_within_a_device_is_a_kernel():
    source = torch.ones(4, device=M0)
    assert torch.zeros(4, device=M0).copy_(source, non_blocking=True).tolist() == [1] * 4


def test_memory_is_not_shared_with_other_processes():
    assert not accelerator.capabilities.ipc
    with pytest.raises(RuntimeError, match="only available on CPU"):
        ForkingPickler.dumps(torch.ones(2, device=M0))
    with pytest.raises(RuntimeError, match="no IPC"):
        torch.musa.Event(interprocess=True)
