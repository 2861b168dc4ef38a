"""Where weights lie between the two ends of a channel: places that are full or closed, and what killed runs left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samples.errors import InputError, RunError
from tests.train.full_disks import no_file_larger_than
from tests.train.weight_sync_cases import plan, selected_accelerator
from train.weight_sync import shared_memory
from train.weight_sync.disk import DiskSender
from train.weight_sync.distributed import BroadcastSender
from train.weight_sync.leftovers import held_directory, held_file, new_name
from train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender


def weights(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"layer.{number}", torch.full((50_000,), float(number))) for number in range(count))


def test_a_full_disk_is_named_and_leaves_the_version_before_and_room_for_another_try(tmp_path):
    sender = DiskSender(plan("disk", tmp_path, bucket_bytes=300_000))
    sender.open()
    list(sender.buckets(0, None, weights(2)))
    root = next(tmp_path.iterdir())
    before = {path.relative_to(root) for path in root.rglob("*")}
    with (
        no_file_larger_than(100_000),
        pytest.raises(RunError, match=r"--weight-update-dir .*the weights were not updated"),
    ):
        list(sender.buckets(1, None, weights(4)))
    assert {path.relative_to(root) for path in root.rglob("*")} == before
    list(sender.buckets(1, None, weights(4)))
    assert sender.finish(1).tensors == 4
    sender.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("closed", ["missing", "full"])
def test_where_the_systems_shared_memory_takes_nothing_another_place_does(closed, tmp_path, monkeypatch):
    elsewhere = tmp_path / "shm"
    if closed == "missing":
        monkeypatch.setattr(shared_memory, "SHARED", elsewhere)
        monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(elsewhere))
    else:
        elsewhere.mkdir()
        monkeypatch.setattr(shared_memory, "SHARED", elsewhere)
        monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(elsewhere))
        write = os.write

        def full(descriptor: int, data: bytes) -> int:
            if Path(f"/proc/self/fd/{descriptor}").readlink().parent == elsewhere:
                raise OSError(28, "No space left on device")
            return write(descriptor, data)

        monkeypatch.setattr(shared_memory.os, "write", full)
    fallback = tmp_path / "run"
    fallback.mkdir()
    sender = SharedMemorySender(plan("tensor", fallback))
    receiver = SharedMemoryReceiver(sender.open())
    assert [path.name for path in fallback.iterdir()] != []
    taken = {}
    for bucket in sender.buckets(0, None, weights(2)):
        for tensors in receiver.tensors(bucket):
            taken |= {name: tensor.clone() for name, tensor in tensors.items()}
    assert all(torch.equal(taken[name], tensor) for name, tensor in weights(2))
    receiver.close()
    sender.close()
    assert list(fallback.iterdir()) == []
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []


def test_no_place_for_shared_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path / "shm")
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    with pytest.raises(InputError, match=r"--weight-update-channel tensor: .*run"):
        SharedMemorySender(plan("tensor", tmp_path / "run")).open()


@pytest.mark.parametrize("channel", ["tensor", "distributed"])
def test_what_a_killed_run_left_is_removed_wherever_it_lay(channel, tmp_path):
    file, descriptor = held_file(tmp_path)
    os.close(descriptor)  # as by the process's end
    directory, descriptor = held_directory(tmp_path)
    (directory / "store").write_text("of a group")
    os.close(descriptor)
    alive, held = held_directory(tmp_path)
    unnamed = tmp_path / f".{new_name()}"  # killed between making and naming it
    unnamed.write_text("")
    old = time.time() - 3600
    os.utime(unnamed, (old, old))
    sender = (
        SharedMemorySender(plan("tensor", tmp_path))
        if channel == "tensor"
        else BroadcastSender(plan("distributed", tmp_path), selected_accelerator())
    )
    sender.open()
    assert not file.exists()
    assert not directory.exists()
    assert not unnamed.exists()
    assert alive.exists()
    sender.close()
    assert list(tmp_path.iterdir()) == [alive]
    os.close(held)


def test_another_run_in_the_same_directory_leaves_a_groups_store_alone(tmp_path):
    sender = BroadcastSender(plan("distributed", tmp_path), selected_accelerator())
    offer = sender.open()
    dist.FileStore(offer.place, 2).set("rank 0", "is here")
    other = DiskSender(plan("disk", tmp_path))
    other.open()  # removes what no living process holds
    assert Path(offer.place).exists()
    other.close()
    sender.close()
    assert list(tmp_path.iterdir()) == []
