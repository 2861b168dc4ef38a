"""What the directory holds through which SGLang servers get their weights, when an update of them fails."""

from __future__ import annotations

import pytest
import torch

from rollout.engines.errors import EngineError
from rollout.engines.sglang.weights import DiskChannel
from tests.train.full_disks import no_file_larger_than


class Server:
    """A server as the channel knows one, without a process: it notes what it was told to read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.fails = False

    async def update_from_disk(self, directory, version, *, flush=True) -> None:
        assert (directory / "model.safetensors.index.json").exists()
        if self.fails:
            raise EngineError("the server has died")
        self.read.append(version)


async def _update(channel: DiskChannel, server: Server, version: str) -> None:
    await channel.begin([server])
    for number in range(3):
        await channel.send({f"layer.{number}": torch.ones(20_000)})
    await channel.finish(version)


async def test_an_update_that_failed_takes_no_room_from_the_next(tmp_path):
    model_dir, root = tmp_path / "model", tmp_path / "weights"
    model_dir.mkdir()
    server = Server()
    channel = DiskChannel(root, model_dir)
    await _update(channel, server, "0")
    (first,) = root.iterdir()
    with no_file_larger_than(50_000), pytest.raises(EngineError, match=rf"{root}.*(space|large)"):
        await _update(channel, server, "1")
    assert list(root.iterdir()) == [first]  # from which a server that is started again reads
    server.fails = True
    with pytest.raises(EngineError, match="has died"):
        await _update(channel, server, "1")
    server.fails = False
    await _update(channel, server, "1")
    assert len(list(root.iterdir())) == 1
    assert await channel.reload(server)
    assert server.read == ["0", "1", "1"]
    channel.close()
    assert not root.exists()
