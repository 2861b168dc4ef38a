"""Weight updates between machines: network namespaces here, each with interfaces and addresses of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from samples.errors import InputError
from tests.train.weight_sync_cases import (
    ProcessCalls,
    hf_greedy,
    plan,
    start_engine,
    start_trainer,
    write_served_model,
)
from train.weight_sync.updater import WeightUpdater


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def networks() -> Iterator[tuple[str, str, str]]:
    """Three machines' networks: two with a cable between them, one alone. None has a way to anywhere else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and its rights")
    word = secrets.token_hex(3)
    names = tuple(f"accelrl-{word}-{number}" for number in range(3))
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", f"w{word}0", "netns", names[0], "type", "veth", "peer", f"w{word}1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for number, name in enumerate(names[:2]):
            ip("-n", name, "addr", "add", f"10.87.3.{number + 1}/30", "dev", f"w{word}{number}")
            ip("-n", name, "link", "set", f"w{word}{number}", "up")
        ip("-n", names[2], "link", "add", f"w{word}2", "type", "veth", "peer", f"w{word}3")
        ip("-n", names[2], "addr", "add", "10.87.9.1/30", "dev", f"w{word}2")
        ip("-n", names[2], "link", "set", f"w{word}2", "up")
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_weights_are_broadcast_from_one_machine_to_another(networks, tmp_path):
    """slime 2373: each end takes its own address, of the interface that reaches the other, at a port held for it."""
    model_dir = write_served_model(tmp_path / "model")
    here, there, alone = networks
    calls = ProcessCalls(start_trainer(model_dir, here), start_engine(model_dir, there))
    try:
        updater = WeightUpdater(calls, check_equal=True)
        updater.open(plan("distributed", tmp_path, timeout=300.0, one_machine=False))
        updater.update(0)
        assert calls.engine.call("greedy") == (hf_greedy(model_dir), 0)
        calls.engine.end()
        calls.engine = start_engine(model_dir, alone)
        apart = plan("distributed", tmp_path, timeout=5.0, one_machine=False)
        offer = calls.trainer.call("open", apart)
        unreached = r"rollout worker on 10\.87\.9\.1 does not reach the trainer at tcp://10\.87\.3\.1:"
        with pytest.raises(InputError, match=unreached):
            calls.engine.call("open", apart, offer)
    finally:
        for process in (calls.trainer, calls.engine):
            process.kill()
