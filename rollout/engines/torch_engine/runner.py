"""The engine's state on the decoding thread: the model, its weights and memory, and whether decoding may go on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from accel.contract import Accelerator
from accel.memory.waiting import wait_until_freed
from rollout.engines.errors import EngineError
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import MEMORY_TAGS
from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.scheduler import Answer, Scheduler
from rollout.engines.torch_engine.sequence import Sequence
from rollout.engines.torch_engine.weights import WeightUpdate
from samples.errors import InputError


@dataclass(frozen=True)
class Snapshot:
    """What other threads may know: replaced as a whole after every step."""

    running: int = 0
    waiting: int = 0
    weight_version: int = -1
    weight_state: str = ""
    refusal: str = ""  # why new requests are refused now; empty when they are taken
    detail: str = ""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    old_cache_tokens: int = 0


class Runner:
    """Everything here runs on the decoding thread, between forward passes."""

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        accelerator: Accelerator,
        *,
        loaded: bool,
        pause_mode: PauseMode = PauseMode.RETRACT,
    ) -> None:
        self._decoder, self._scheduler, self._accelerator = decoder, scheduler, accelerator
        self._pause_mode = pause_mode
        self._paused = False
        self._update: WeightUpdate | None = None
        self._update_version = -1
        self._builds_on_whole = False  # the update under way may keep tensors of the version before
        self._no_weights = "" if loaded else "the engine was started without weights: send all of them first"
        self._released: set[str] = set()

    @property
    def can_step(self) -> bool:
        ready = not (self._paused or self._update or self._no_weights or self._released)
        return ready and bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> None:
        self._scheduler.step()

    def answers(self) -> list[Answer]:
        return self._scheduler.answers()

    def submit(self, sequences: SequenceOf[Sequence]) -> None:
        self._scheduler.submit(sequences)

    def abort(self, sequences: SequenceOf[Sequence] | None = None) -> None:
        self._scheduler.abort(sequences)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def begin_update(self, version: int) -> None:
        """Start over with nothing received; an update that was under way is given up."""
        if "weights" in self._released:
            raise EngineError("the engine's weights are released: call resume_memory before an update")
        if self._pause_mode is PauseMode.ABORT:
            self._scheduler.interrupt()
        self._builds_on_whole = self.held_version is not None
        self._update = WeightUpdate(self._decoder.weights)
        self._update_version = version

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        update = self._open_update()
        try:
            update.take(tensors)
        except InputError as error:
            self._fail_update(error)
            raise
        self._accelerator.synchronize()  # the sender may reuse its memory as soon as this returns

    def commit_update(self, version: int) -> None:
        update = self._open_update()
        if version != self._update_version:
            raise InputError(f"commit_update: version {version} given, but begin_update said {self._update_version}")
        try:
            update.finish()
        except InputError as error:
            self._fail_update(error)
            raise
        self._update, self._no_weights = None, ""
        self._scheduler.change_weights(version, keep_cache=self._pause_mode is PauseMode.IN_PLACE)

    @property
    def held_version(self) -> int | None:
        """Version whose tensors are all in place, so that an update may leave some of them; None when they are not."""
        whole = not (self._update or self._no_weights or self._released)
        return self._scheduler.weight_version if whole else None

    def keep_weights(self, names: frozenset[str]) -> None:
        """Count tensors of the version before as arrived: they are the same in the version under way."""
        update = self._open_update()
        try:
            if not self._builds_on_whole:
                raise InputError("weight update: tensors are to be kept, but the engine held no whole version before")
            update.keep(names)
        except InputError as error:
            self._fail_update(error)
            raise

    def fail_update(self, reason: str) -> None:
        """Answer nothing until a whole update has come, because this one will not be."""
        self._update = None
        self._no_weights = f"{reason}; send a whole update"

    def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names whose values are not the ones that are in use."""
        return self._decoder.weights.differing(tensors)

    def flush_cache(self) -> None:
        """Drop all keys and values; what runs is computed again from its tokens when decoding goes on."""
        if "kv_cache" not in self._released:
            self._scheduler.restart()

    def release_memory(self, tags: tuple[str, ...], timeout: float) -> None:
        before = self._accelerator.memory_info()
        for tag in self._tags(tags):
            if tag in self._released:
                continue
            if tag == "kv_cache":
                self._scheduler.restart()
                self._decoder.release_cache()
            elif tag == "graphs":
                self._decoder.release_step()
            else:
                self._update = None
                self._no_weights = "the engine's weights were released and have to be sent again"
                self._decoder.release_weights()
            self._released.add(tag)
        self._accelerator.empty_cache()
        left = self._accelerator.memory_info().allocated or 0
        given_back = max(0, (before.allocated or 0) - left)
        wait_until_freed(self._accelerator, before, given_back, timeout, "the rollout engine")

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        for tag in self._tags(tags):
            if tag not in self._released:
                continue
            if tag == "kv_cache":
                self._decoder.allocate_cache()
            elif tag == "weights":
                self._decoder.allocate_weights()
            self._released.remove(tag)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            weight_version=self._scheduler.weight_version,
            weight_state=self._weight_state(),
            refusal=self._refusal(),
            detail=self._detail(),
            generated_tokens=self._scheduler.generated_tokens,
            prefill_tokens=self._scheduler.prefill_tokens,
            old_cache_tokens=self._scheduler.old_cache_tokens,
        )

    def _weight_state(self) -> str:
        if self._update:
            return f"updating-{self._update_version}"
        return "none" if self._no_weights or "weights" in self._released else str(self._scheduler.weight_version)

    def _refusal(self) -> str:
        if self._released:
            return f"the engine's memory is released ({', '.join(sorted(self._released))}): call resume_memory first"
        return "" if self._update else self._no_weights

    def _detail(self) -> str:
        if self._refusal():
            return self._refusal()
        if self._update:
            return f"receiving weights of version {self._update_version}"
        return "paused" if self._paused else ""

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise EngineError(self._no_weights or "no weight update is open: call begin_update first")
        return self._update

    def _fail_update(self, error: InputError) -> None:
        """Tensors of two versions may be mixed now: nothing is answered until a whole update has come."""
        self._update = None
        self._no_weights = f"the update to weight version {self._update_version} failed, send a whole one: {error}"

    def _tags(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [tag for tag in tags if tag not in MEMORY_TAGS]
        if unknown:
            raise InputError(f"memory tag {unknown[0]!r} is unknown: use {', '.join(MEMORY_TAGS)}, or none for all")
        return tags or MEMORY_TAGS
