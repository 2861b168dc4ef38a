"""Actors that start engines' processes on the nodes of a Ray cluster; a light server stands in for SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.deploy.layout import describe_flags, plan_layout
from rollout.engines.errors import EngineError
from rollout.engines.sglang.http import HttpClient
from train.engine_hosts import EngineHostActor, RaySpawner
from train.local_ray import LocalRay

pytestmark = pytest.mark.slow

SERVER = """
import http.server, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def actors():
    """Two hosts, of one place each."""
    local = LocalRay()
    local.start({"num_cpus": 0, "include_dashboard": False, "resources": {"accelrl_cpu": 2}, "logging_level": "error"})
    import ray  # only now: it reads how its processes trust each other when it is imported

    host = ray.remote(EngineHostActor)
    yield [host.options(num_cpus=0, resources={"accelrl_cpu": 1}).remote(True) for _ in range(2)]
    local.stop()


async def program_on(host, log: Path, *command: str):
    program = host.program("server", command, log, {"WHO": "host"})
    program.start()
    return program


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until_ended(pid: int) -> None:
    async with asyncio.timeout(30):
        while not ended(pid):
            await asyncio.sleep(0.05)


def by_name(actors: list[Any]) -> dict[str, Any]:
    """As the layout of ``--rollout-num-gpus`` names its engines."""
    return {f"actor-0-regular-{number}": actor for number, actor in enumerate(actors)}


async def test_each_engine_has_its_host_whose_ports_nobody_else_is_given(actors):
    plans = plan_layout(describe_flags(rollout_num_gpus=3)).engines
    spawner = RaySpawner(by_name(actors))
    hosts = [await spawner.host_of(plan) for plan in plans[:2]]
    assert hosts[0] is await spawner.host_of(plans[0]) is not hosts[1]
    assert {host.address for host in hosts} == {"127.0.0.1"}
    assert {host.first_device for host in hosts} == {0}
    ports = [await host.take_port() for host in hosts for _ in range(20)]
    assert len(set(ports)) == len(ports)
    with pytest.raises(EngineError, match="actor-0-regular-2: devices were reserved for actor-0-regular-0, actor"):
        await spawner.host_of(plans[2])


async def test_a_server_is_started_watched_killed_started_again_and_stopped(actors, tmp_path):
    host = await RaySpawner(by_name(actors)).host_of(plan_layout(describe_flags(rollout_num_gpus=1)).engines[0])
    port = await host.take_port()
    client = HttpClient(connections=4)
    url = f"http://{host.address}:{port}"
    program = await program_on(host, tmp_path / "log", sys.executable, "-c", SERVER, host.address, str(port))
    try:
        await program.wait_ready(lambda: client.answers(url), 60, "--flag")
        assert program.alive
        pid = int(await client.get(url))
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while program.alive:
                await asyncio.sleep(0.05)
        await program.stop()
        program.start()
        await program.wait_ready(lambda: client.answers(url), 60, "--flag")
        pid = int(await client.get(url))
        await program.stop()
        assert ended(pid)
        assert not program.alive
        await program.stop()
    finally:
        await client.close()


async def test_one_that_does_not_start_is_told_with_the_end_of_its_log(actors, tmp_path):
    host = await RaySpawner(by_name(actors)).host_of(plan_layout(describe_flags(rollout_num_gpus=1)).engines[0])
    command = (sys.executable, "-c", "import os; print('no such model for', os.environ['WHO']); raise SystemExit(3)")
    program = await program_on(host, tmp_path / "log", *command)

    async def never() -> bool:
        return False

    with pytest.raises(
        EngineError, match=r"(?s)server ended with status 3 before it was ready.*no such model for host"
    ):
        await program.wait_ready(never, 60, "--flag")


async def test_what_it_started_ends_with_a_host_that_dies(actors, tmp_path):
    import ray

    host = await RaySpawner(by_name(actors[1:])).host_of(plan_layout(describe_flags(rollout_num_gpus=1)).engines[0])
    port = await host.take_port()
    client = HttpClient(connections=4)
    url = f"http://{host.address}:{port}"
    program = await program_on(host, tmp_path / "log", sys.executable, "-c", SERVER, host.address, str(port))
    await program.wait_ready(lambda: client.answers(url), 60, "--flag")
    pid = int(await client.get(url))
    await client.close()
    ray.kill(actors[1])
    await until_ended(pid)
    deadline = time.monotonic() + 30
    while program.alive and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not program.alive
    assert "Its host does not answer" in program.last_words()
    await program.stop()


async def test_a_log_that_a_host_cannot_write_is_told(actors, tmp_path):
    plan = plan_layout(describe_flags(rollout_num_gpus=1)).engines[0]
    host = await RaySpawner(by_name(actors)).host_of(plan)
    (tmp_path / "file").write_text("")
    program = await program_on(host, tmp_path / "file" / "log", sys.executable, "-c", "")

    async def never() -> bool:
        return False

    with pytest.raises(EngineError, match=r"cannot be started with the log .*--sglang-log-dir"):
        await program.wait_ready(never, 20, "--flag")
