"""Processes, ports and addresses of servers: light stand-ins that are started and ended for real."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout.deploy.addresses import base_url, parse_address
from rollout.deploy.description import Description, GroupSpec, Machines, ModelSpec
from rollout.deploy.layout import plan_layout
from rollout.deploy.ports import PortLease
from rollout.deploy.process import ServerProcess
from rollout.engines.errors import EngineError
from samples.errors import InputError

SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


async def is_up(process):
    return "\nup" in process.log.read_text()


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("localhost:30000", "localhost", 30000, "http://localhost:30000"),
        ("10.0.0.5:80", "10.0.0.5", 80, "http://10.0.0.5:80"),
        ("[fd00::7]:8000", "fd00::7", 8000, "http://[fd00::7]:8000"),
        ("http://node-3.cluster:30000/", "node-3.cluster", 30000, "http://node-3.cluster:30000"),
    ],
)
def test_addresses_are_read_and_written_for_names_ipv4_and_ipv6(text, host, port, url):
    assert parse_address(text, "--flag") == (host, port)
    assert base_url(host, port) == url


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:port", "fd00::7", "https://h:1", "h:1/path", "a b:1", "h:99999", "h:0"]
)
def test_what_is_no_address_is_refused_by_flag(text):
    with pytest.raises(InputError, match=r"^--rollout-external-engine-addrs .*expected host:port"):
        parse_address(text, "--rollout-external-engine-addrs")


def test_a_port_is_held_against_other_processes_until_it_is_given_back():
    ports = PortLease()
    taken = [ports.take() for _ in range(20)]
    assert len(set(taken)) == 20
    code = (
        "import sys; from rollout.deploy import ports as module; from rollout.deploy.ports import PortLease\n"
        f"module.FIRST, module.LAST = {min(taken)}, {min(taken)}\n"
        "try: print(PortLease().take())\n"
        "except Exception as error: print(error)\n"
    )

    def other_process():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert "no port from" in other_process()
    ports.give_back(min(taken))
    assert other_process() == str(min(taken))
    ports.close()


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr("rollout.deploy.ports._candidates", lambda: iter([port, 20001]))
        lease = PortLease()
        assert lease.take() == 20001
        lease.close()


def test_a_port_whose_last_connection_has_just_ended_is_passed_over(monkeypatch):
    """Its server could not bind it everywhere: the kernel keeps it for a minute (TIME_WAIT)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            accepted, _ = listener.accept()
            accepted.close()
            caller.recv(1)
    monkeypatch.setattr("rollout.deploy.ports._candidates", lambda: iter([port, 20003]))
    lease = PortLease()
    assert lease.take() == 20003
    lease.close()


def test_ports_of_200_layouts_started_side_by_side_never_collide():
    """Eight runs at once plan layouts at random, take ports for every engine and bind them all."""
    chance = random.Random(7)

    def start(size):
        per_engine = chance.choice([1, 2])
        groups = (GroupSpec(num_gpus=size * per_engine, num_gpus_per_engine=per_engine),)
        layout = plan_layout(Description(models=(ModelSpec(name="actor", server_groups=groups),), machines=Machines()))
        lease, sockets = PortLease(), []
        try:
            for _ in layout.engines:
                for _ in range(2):
                    bound = socket.socket()
                    bound.bind(("127.0.0.1", lease.take()))  # raises where another has it
                    bound.listen()
                    sockets.append(bound)
            return len({bound.getsockname()[1] for bound in sockets}) == 2 * len(layout.engines)
        finally:
            for bound in sockets:
                bound.close()
            lease.close()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, [chance.randint(1, 4) for _ in range(200)]))


async def test_a_server_that_ends_before_it_is_ready_is_told_with_its_last_lines(tmp_path):
    code = "import sys; print('loading'); print('no such model: x', file=sys.stderr); sys.exit(3)"
    process = ServerProcess("server a", [sys.executable, "-S", "-c", code], tmp_path / "logs" / "a.log")
    process.start()

    async def never():
        return False

    with pytest.raises(EngineError) as caught:
        await process.wait_ready(never, 30, "--flag")
    assert str(caught.value).startswith("server a ended with status 3 before it was ready. The end of ")
    assert "no such model: x" in str(caught.value)
    await process.stop()


async def test_a_server_that_is_never_ready_is_told_with_the_flag_and_can_be_stopped(tmp_path):
    process = ServerProcess("server a", SLEEP, tmp_path / "a.log")
    process.start()

    async def never():
        return False

    with pytest.raises(EngineError, match=r"server a was not ready within 0\.2 s \(--sglang-start-timeout\)"):
        await process.wait_ready(never, 0.2, "--sglang-start-timeout")
    assert process.alive
    await process.stop()
    assert not process.alive
    await process.stop()  # may be called twice


async def test_a_server_and_what_it_started_end_when_it_is_stopped(tmp_path):
    code = (
        "import subprocess, sys, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print('up', child.pid, flush=True); time.sleep(600)"
    )
    process = ServerProcess("server a", [sys.executable, "-S", "-c", code], tmp_path / "a.log")
    process.start()
    await process.wait_ready(lambda: is_up(process), 30, "")
    child = int(process.log.read_text().rsplit("up ", 1)[1])
    assert is_running(child)
    await process.stop()
    wait_until(lambda: not is_running(child))


def test_a_server_ends_with_a_run_that_is_killed(tmp_path):
    code = f"""
import asyncio, pathlib
from rollout.deploy.process import ServerProcess
async def main():
    tell = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"
    process = ServerProcess("a", {SLEEP[:-1]!r} + [tell], pathlib.Path({str(tmp_path / "a.log")!r}))
    process.start()
    await asyncio.sleep(600)
asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "a.log"
    wait_until(lambda: log.exists() and "\nup " in log.read_text())
    server = int(log.read_text().rsplit("up ", 1)[1])
    assert is_running(server)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: not is_running(server))


def test_servers_need_no_terminal_signal_of_ours(tmp_path):
    """A Ctrl-C goes to the terminal's foreground group; servers are in one of their own and are ended in order."""
    process = ServerProcess("a", SLEEP, tmp_path / "a.log")
    process.start()
    try:
        wait_until(lambda: "\nup" in process.log.read_text())
        assert process._process is not None
        assert os.getpgid(process._process.pid) != os.getpgid(0)
    finally:
        asyncio.run(process.stop())


async def test_a_server_ends_when_its_supervisor_alone_is_killed_as_ray_does_with_a_workers_children(tmp_path):
    process = ServerProcess("sleeper", SLEEP, tmp_path / "log")
    process.start()
    await process.wait_ready(lambda: is_up(process), 20, "--flag")
    family = [process._process.pid]
    while found := children_of(family[-1]):
        family += found
    assert len(family) == 3
    os.kill(family[0], signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not any(is_running(pid) for pid in family[1:]))
    assert not process.alive
    await process.stop()


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


async def test_a_server_of_a_worker_that_sigterm_does_not_reach_is_asked_to_end_all_the_same(tmp_path):
    """Ray's workers are started with the signal blocked, and what they start inherits that."""
    asked, there = tmp_path / "asked", tmp_path / "there"
    code = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(asked)!r}).touch(); sys.exit()\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(there)!r}).touch(); time.sleep(60)"
    )
    process = ServerProcess("server", [sys.executable, "-c", code], tmp_path / "log")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while not there.exists():
        await asyncio.sleep(0.01)
    await process.stop()
    assert asked.exists()
