"""A few rank processes that stay up and run one function at a time, each as a rank of a real process group."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel.contract import Accelerator
from accel.handoff import accelerator_spec, load_accelerator_spec

Program = Callable[..., Any]
GROUP_TIMEOUT = timedelta(seconds=60)


class RankFailure(AssertionError):
    """A rank raised, ended or did not answer in time; the message holds each rank's own words."""


class RankPool:
    """``world_size`` processes of one accelerator. ``run`` calls a module-level function in all of them.

    The function gets the accelerator, its rank and the world size first, with torch.distributed initialised unless it
    is called with ``group=False``, which hands it a file store instead. After a failure the processes are ended and
    the next ``run`` starts fresh ones, so that one broken check does not take the others along.
    """

    def __init__(self, accelerator: Accelerator, world_size: int, timeout: float = 180) -> None:
        self.world_size = world_size
        self._accelerator = accelerator
        self._timeout = timeout
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="accelrl-conformance-")
        self._runs = 0
        self._broken: str | None = None  # why ranks cannot begin at all, which is then not tried again

    def run(self, program: Program, *arguments: Any, group: bool = True) -> list[Any]:
        """Results by rank; RankFailure when any rank fails."""
        if self._broken is None and not self._ranks:
            self._start()
        if self._broken is not None:
            raise RankFailure(self._broken)
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        unsent = [self._send(rank, (program, arguments, store, group)) for rank in range(self.world_size)]
        answers = [failure or self._receive(rank) for rank, failure in enumerate(unsent)]
        failures = [f"rank {rank}: {text}" for rank, (failed, text) in enumerate(answers) if failed]
        if failures:
            self._stop()
            raise RankFailure("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        """Fresh interpreters, whatever started this one, with the worker's environment in place before they begin."""
        environment = os.environ | self._accelerator.worker_env(threads=1)
        spec = accelerator_spec(self._accelerator)
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            arguments = [str(theirs.fileno()), spec, str(rank), str(self.world_size)]
            command = [sys.executable, "-c", "from accel.conformance.ranks import serve; serve()", *arguments]
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
            theirs.close()
            self._ranks.append((process, ours))
        begun = [self._receive(rank) for rank in range(self.world_size)]
        failures = [f"rank {rank} cannot begin: {text}" for rank, (failed, text) in enumerate(begun) if failed]
        if failures:
            self._stop()
            self._broken = "\n".join(failures)

    def _send(self, rank: int, message: Any) -> tuple[bool, Any] | None:
        """None when it was sent; else the failure."""
        try:
            self._ranks[rank][1].send(message)
        except OSError:
            return self._ended(rank)
        return None

    def _receive(self, rank: int) -> tuple[bool, Any]:
        connection = self._ranks[rank][1]
        try:
            if connection.poll(self._timeout):
                return connection.recv()
        except (EOFError, OSError):
            return self._ended(rank)
        return True, f"no answer within {self._timeout:.0f} s"

    def _ended(self, rank: int) -> tuple[bool, str]:
        try:
            return True, f"the process ended with status {self._ranks[rank][0].wait(5)}"
        except subprocess.TimeoutExpired:
            return True, "the process closed its connection and still runs"

    def _stop(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks = []


def serve() -> None:
    """A rank's life: take a program, run it, send back what it returned or raised; end when the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    spec, rank, world_size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    import torch

    torch.set_num_threads(1)
    try:
        accelerator = load_accelerator_spec(spec)
        accelerator.set_device(rank % accelerator.device_count())
    except Exception:  # noqa: BLE001 - a vendor's call may raise anything: every check that needs ranks fails with it
        connection.send((True, traceback.format_exc()))
        return
    connection.send((False, "ready"))
    while True:
        try:
            program, arguments, store_path, group = connection.recv()
        except EOFError:
            return
        try:
            result = _call(program, arguments, accelerator, rank, world_size, store_path, group)
            connection.send((False, result))
        except Exception:  # noqa: BLE001 - sent to the suite, which fails the check with it
            connection.send((True, traceback.format_exc()))


def _call(
    program: Program, arguments: Any, accelerator: Accelerator, rank: int, world_size: int, store_path: str, group: bool
) -> Any:
    from accel.comm import destroy_process_group, init_process_group

    store = dist.FileStore(store_path, world_size)
    if not group:
        return program(accelerator, rank, world_size, store, *arguments)
    init_process_group(accelerator, rank=rank, world_size=world_size, store=store, timeout=GROUP_TIMEOUT)
    # A rank that is done early closes its connections, which would fail another's that still makes them.
    store.set(f"connected-{rank}", "")
    store.wait([f"connected-{other}" for other in range(world_size)], GROUP_TIMEOUT)
    try:
        return program(accelerator, rank, world_size, *arguments)
    finally:
        destroy_process_group()
