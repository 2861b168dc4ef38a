"""What the rollout worker orders of the trainer's first rank, for groups with SGLang servers.

Here the trainer is alone in them; real servers are in those of ``test_sglang_training.py``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from urllib.parse import urlsplit

import pytest
import torch

from accel import select_accelerator
from rollout.engines.errors import EngineError
from rollout.engines.sglang.group_channel import GroupChannel
from rollout.engines.sglang.group_orders import Orders
from samples.errors import InputError
from tests.train.weight_sync_cases import plan
from train.config.checks.weight_updates import weight_update_problems
from train.config.run import RunConfig
from train.weight_sync.factory import chosen_channel, server_channel
from train.weight_sync.server_group import ServerGroupReceiver, ServerGroupSender

WEIGHTS = {f"layer.{number}": torch.full((3, 50 + number), float(number)) for number in range(9)}


class AloneInGroups:
    """A server as ``GroupChannel`` knows one, with no ranks: the trainer is alone in every group."""

    tensor_parallel_size = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check_has(self, paths, flag) -> None: ...

    def __getattr__(self, name):
        async def call(*_arguments, **_named) -> None:
            self.calls.append(name)

        return call


@pytest.fixture
def sender(tmp_path):
    import dataclasses

    made = ServerGroupSender(
        dataclasses.replace(plan("server_group", tmp_path, bucket_bytes=2000), keeps_weights=True),
        select_accelerator("cpu"),
    )
    offer = made.open()
    made.connect()
    yield made, offer
    made.close()
    assert "weights to servers" not in {thread.name for thread in threading.enumerate()}


def drawn(sender, version=0):
    return list(sender.buckets(version, None, iter(WEIGHTS.items())))


async def open_orders(offer) -> Orders:
    orders = Orders(offer.place, offer.word)
    await orders.open()
    return orders


async def test_a_server_that_was_started_again_is_sent_everything_and_the_group_is_made_anew(sender):
    made, offer = sender
    channel = GroupChannel(await open_orders(offer), "gloo")
    servers = [AloneInGroups(), AloneInGroups()]
    assert not await channel.reload(servers[0])  # nothing was sent yet
    await channel.begin(servers)
    buckets = drawn(made)
    assert len(buckets) > 3
    for bucket in buckets:
        (tensors,) = ServerGroupReceiver().tensors(bucket)
        assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
        await channel.send(tensors)
    await channel.finish("0")
    assert servers[0].calls.count("join_group") == 1
    servers[0].calls.clear()

    assert await channel.reload(servers[0])
    assert servers[0].calls.count("update_from_group") == len(buckets)
    assert servers[0].calls[-2:] == ["set_version", "leave_group"]
    assert len(made._groups) == 1
    before = set(made._groups)
    for server in servers:
        server.calls.clear()
    await channel.begin(servers)
    assert servers[0].calls == ["join_group", "begin_update"]  # its process knows nothing of the group before
    assert servers[1].calls == ["leave_group", "join_group", "begin_update"]
    assert set(made._groups).isdisjoint(before)
    channel.close()


async def test_what_is_kept_are_the_weights_that_were_sent(sender):
    made, offer = sender
    buckets = drawn(made)
    for number, bucket in enumerate(buckets):
        described, raw = made._bytes(number)
        assert [one.name for one in bucket.tensors] == [one.name for one in described.tensors]
        for name, tensor in described.unpack(raw).items():
            assert torch.equal(tensor, WEIGHTS[name])
    summary = made.finish(0)
    assert (summary.tensors, summary.digest) == (len(WEIGHTS), None)
    assert summary.nbytes >= sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert offer.place.startswith("http://127.0.0.1:")


async def test_what_cannot_be_done_is_told_in_the_trainers_words(sender):
    made, offer = sender
    orders = await open_orders(offer)
    drawn(made)
    with pytest.raises(EngineError, match="the trainer: send nowhere: 'nowhere'"):
        await orders.send("nowhere", 0)
    await orders.join("here", 1)
    with pytest.raises(EngineError, match="bucket 99 is not kept"):
        await orders.send("here", 99)
    await orders.send("here", 0)
    orders.close()
    with pytest.raises(EngineError, match="connection to the trainer is closed"):
        await orders.send("here", 0)


async def test_a_stranger_is_not_heard_and_a_trainer_that_has_gone_is_named(sender):
    made, offer = sender
    stranger = Orders(offer.place, "guess")
    with pytest.raises(EngineError, match="the trainer has gone"):
        await stranger.open()
    stranger.close()
    orders = await open_orders(offer)
    await asyncio.to_thread(made.close)
    with pytest.raises(EngineError, match="the trainer has gone"):
        await orders.leave("any")
    orders.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        await open_orders(offer)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"word": "\\ud800"}\n', b"\xff\xfe\n", b"x" * 200_000, b""]
)
async def test_whoever_else_connects_does_not_end_the_channel(said, sender):
    _, offer = sender
    address = urlsplit(offer.place)
    with socket.create_connection((address.hostname, address.port), timeout=10) as scanner:
        scanner.sendall(said)
        orders = await asyncio.wait_for(open_orders(offer), 10)  # also while the other says nothing
        await asyncio.wait_for(orders.join("here", 1), 10)
        orders.close()


def test_servers_take_weights_from_the_trainer_itself_where_distributed_is_asked_for():
    def config(**sections) -> RunConfig:
        given = {"weights": {"weight_update_channel": "distributed"}, "rollout": {"rollout_engine": "sglang"}}
        return RunConfig.model_validate(given | sections)

    for launcher in ("ray", "inline"):
        of_run = config(job={"launcher": launcher})
        assert (chosen_channel(of_run), server_channel(of_run)) == ("server_group", "distributed")
        assert not list(weight_update_problems(of_run))


async def test_an_address_that_is_none_is_refused():
    with pytest.raises(InputError, match="expected host:port"):
        Orders("nowhere", "word")
