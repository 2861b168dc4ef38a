"""``--release-train`` on Ray: a trainer's actors are asked for their state and end, processes and all."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from train.checkpoint.manifest import TrainerState
from train.checkpoint.released import ReleasedState, SavedTrainer


class TrainerRelease:
    """``timeout``: seconds that actors may take to close, and processes to end."""

    def __init__(self, directory: Path, timeout: float) -> None:
        self._state = ReleasedState(directory)
        self._timeout = timeout

    @property
    def latest(self) -> SavedTrainer | None:
        """What the next trainer begins from; None before the first step."""
        return self._state.latest

    def keep_state(self, trainers: list[Any]) -> None:
        import ray

        work = self._state.begin()
        saving = [trainer.save_state.remote(work) for trainer in trainers]
        ray.wait(saving, num_returns=len(saving))  # an error of one must not leave the others at work
        self._state.keep(work, ray.get(saving)[0])

    def copy_to(self, directory: Path) -> TrainerState:
        """The kept state as the trainer's half of a checkpoint."""
        return self._state.copy_to(directory)

    def end(self, trainers: list[Any], rollout: Any) -> None:
        """Close both ends of the weight channel and all groups, then end the actors of ``trainers``, which is empty
        afterwards; return once none of their processes is left. TimeoutError when one stays."""
        import ray

        processes = ray.get([trainer.process.remote() for trainer in trainers])
        closing = [trainer.close.remote() for trainer in trainers]
        if rollout is not None:
            closing.append(rollout.receiving.remote("close"))
        done, pending = ray.wait(closing, num_returns=len(closing), timeout=self._timeout)
        ray.get(done)
        if pending:
            raise TimeoutError(f"{len(pending)} worker(s) did not close within {self._timeout:g} s")
        ended = list(trainers)
        trainers.clear()
        for actor in ended:
            ray.kill(actor)
        _wait_until_ended(ended, processes, self._timeout)

    def close(self) -> None:
        self._state.close()


def _wait_until_ended(actors: list[Any], processes: list[tuple[str, int]], timeout: float) -> None:
    """``processes``: (node, process id). One of another node has ended when Ray knows that its actor has."""
    import ray

    deadline = time.monotonic() + timeout
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(actor.ready.remote(), timeout=timeout)
    here = ray.get_runtime_context().get_node_id()
    for process in (process for node, process in processes if node == here):
        while _is_alive(process):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the trainer's process {process} did not end within {timeout:g} s")
            time.sleep(0.005)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
