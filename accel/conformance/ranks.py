"""A few rank processes that stay up and run one function at a time, each as a rank of a real process group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel.contract import Accelerator
from accel.errors import AcceleratorError
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
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="accelrl-conformance-")
        self._runs = 0

    def run(self, program: Program, *arguments: Any, group: bool = True) -> list[Any]:
        """Results by rank; RankFailure when any rank fails."""
        if not self._ranks:
            self._start()
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        for _, connection in self._ranks:
            connection.send((program, arguments, store, group))
        answers = [self._answer(rank) for rank in range(self.world_size)]
        failures = [f"rank {rank}: {text}" for rank, (failed, text) in enumerate(answers) if failed]
        if failures:
            self._stop()
            raise RankFailure("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        spec = accelerator_spec(self._accelerator)
        with _environment(self._accelerator.worker_env(threads=1)):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, spec, rank, self.world_size), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._ranks[rank]
        if not connection.poll(self._timeout):
            return True, f"no answer within {self._timeout:.0f} s"
        try:
            return connection.recv()
        except EOFError:
            process.join(5)
            return True, f"the process ended with status {process.exitcode}"

    def _stop(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []


def _serve(connection: Connection, spec: str, rank: int, world_size: int) -> None:
    """A rank's life: take a program, run it, send back what it returned or raised; end when the pipe closes."""
    import torch

    torch.set_num_threads(1)
    ready: Accelerator | AcceleratorError
    try:
        ready = load_accelerator_spec(spec)
        ready.set_device(rank % ready.device_count())
    except AcceleratorError as error:
        ready = error
    while True:
        try:
            program, arguments, store_path, group = connection.recv()
        except EOFError:
            return
        try:
            if isinstance(ready, AcceleratorError):
                raise ready
            result = _call(program, arguments, ready, rank, world_size, store_path, group)
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
    try:
        return program(accelerator, rank, world_size, *arguments)
    finally:
        destroy_process_group()


@contextmanager
def _environment(values: dict[str, str]) -> Any:
    """Set for the processes started inside, which inherit it before their Python starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
