"""The roles as Ray actors, each in a process of its own, and their errors as they were raised."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import AcceleratorError
from samples.errors import InputError, RunError
from train.checkpoint.background import Published
from train.checkpoint.manifest import Checkpoint, Manifest, RolloutState, TrainerState
from train.checkpoint.released import SavedTrainer
from train.config.run import RunConfig
from train.loop import StepOutput

if TYPE_CHECKING:
    from train.batch import TrainBatch
    from train.megatron.weights.loading import LoadReport
    from train.profiling import ProfilePlan

_PLAIN = (InputError, AcceleratorError, RunError)  # errors whose words are for the person who started the run


class RolloutActor:
    """The rollout role in a process of its own."""

    def __init__(
        self,
        config: RunConfig,
        accelerator_spec: str,
        resume: Checkpoint | None,
        profile: ProfilePlan | None,
        engine_hosts: dict[str, Any],
    ) -> None:
        gc.disable()  # until the role has started: train.collection
        from train.devices import worker_accelerator
        from train.engine_hosts import RaySpawner
        from train.roles import RolloutRole

        self._failure: Exception | None = None
        spawner = RaySpawner(engine_hosts) if engine_hosts else None
        try:
            accelerator = worker_accelerator(config, accelerator_spec, needs_device=spawner is None)
            self._role = RolloutRole(config, accelerator, resume, profile, spawner)
        except _PLAIN as error:
            self._failure = error  # of what a constructor raises Ray keeps the text alone: `start` raises it

    def start(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._role.start()

    def rollout(self, rollout_id: int) -> tuple[TrainBatch | None, StepOutput, bool]:
        batch, output = self._role.rollout(rollout_id)
        return batch, output, batch is not None

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return self._role.evaluate(rollout_id)

    def settle(self) -> None:
        self._role.settle()

    def memory_call(self, call: str, *arguments: Any) -> Any:
        """What ``train.turns`` asks of this side."""
        return getattr(self._role, call)(*arguments)

    def save_state(self, directory: Path) -> RolloutState:
        return self._role.save_state(directory)

    def receiving(self, call: str, *arguments: Any) -> Any:
        """A call of this end of the weight channel."""
        return getattr(self._role.receiving, call)(*arguments)

    def close(self) -> None:
        if self._failure is None:
            self._role.close()


class TrainerActor:
    """One trainer rank in a process of its own."""

    def __init__(
        self,
        config: RunConfig,
        accelerator_spec: str,
        rank: int,
        store_path: str | None,
        resume: Checkpoint | SavedTrainer | None,
        profile: ProfilePlan | None,
    ) -> None:
        gc.disable()  # until the role has started: train.collection
        from train.devices import worker_accelerator
        from train.roles import TrainerRole

        self._failure: Exception | None = None
        try:
            self._accelerator = worker_accelerator(config, accelerator_spec)
            self._role = TrainerRole(
                config, self._accelerator, rank=rank, store_path=store_path, resume=resume, profile=profile
            )
        except _PLAIN as error:
            self._failure = error  # of what a constructor raises Ray keeps the text alone: `ready` raises it

    def ready(self) -> LoadReport:
        """What this rank read of the model's files."""
        if self._failure is not None:
            raise self._failure
        return self._role.weights_read

    def process(self) -> tuple[str, int]:
        """The node and the process that this rank lives in."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def train(self, batch: TrainBatch, rollout_id: int) -> dict[str, float]:
        return self._role.train(batch, rollout_id)

    def memory_call(self, call: str, *arguments: Any) -> Any:
        """What ``train.turns`` asks of this side."""
        return getattr(self._role, call)(*arguments)

    def device(self) -> str | None:
        """The device that this worker was given, as the vendor's variable lists it; None where there is no variable."""
        from accel.visibility import physical_device_id

        if self._accelerator.visible_devices_env is None:
            return None
        return physical_device_id(self._accelerator.current_device(), self._accelerator)

    def sending(self, call: str, *arguments: Any) -> Any:
        """A call of this end of the weight channel."""
        return getattr(self._role.sending, call)(*arguments)

    def save_state(self, directory: Path) -> TrainerState:
        return self._role.save_state(directory)

    def begin_save(self, work: Path, draft: Manifest) -> None:
        self._role.begin_save(work, draft)

    def saved(self, *, wait: bool) -> Published | None:
        return self._role.saved(wait=wait)

    def save_hf(self, directory: Path) -> None:
        self._role.save_hf(directory)

    def close(self) -> None:
        if self._failure is None:
            self._role.close()


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the worker's own error instead of Ray's wrapper around it."""
    import ray.exceptions

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, _PLAIN):
            raise cause.with_traceback(None) from None  # as it came: a subclass may be made of other arguments
        raise


def any_died(closing: list[Any]) -> bool:
    """Whether an actor was dead already when it was asked to close. Raises what went wrong in one that was not."""
    import ray

    died = False
    for reference in closing:
        try:
            ray.get(reference)
        except ray.exceptions.RayActorError:
            died = True
    return died
