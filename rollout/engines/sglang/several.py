"""Several models, each behind a router of its own, as one engine: the trained model answers, the others stand by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rollout.engines.protocol import MEMORY_TIMEOUT, EngineCapabilities, EngineHealth, GenerateRequest, GenerateResult
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.server import all_of, first_failure
from samples.errors import InputError


class SGLangModels:
    """``engines``: one for each model, in the order of the layout. Requests go to the first that is ``updated``.

    Frozen models get no weights and no requests of the run's own; functions of the user's reach them at
    ``args.sglang_model_routers[name]``. They are started, watched and ended with the others.
    """

    def __init__(self, engines: Sequence[SGLangEngine], updated: Sequence[SGLangEngine]) -> None:
        self._engines, self._updated = tuple(engines), tuple(updated)
        self._main = self._updated[0]

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._main.capabilities

    @property
    def weight_version(self) -> int:
        return self._main.weight_version

    @property
    def model_routers(self) -> dict[str, tuple[str, int]]:
        return {name: address for engine in self._engines for name, address in engine.model_routers.items()}

    @property
    def description(self) -> str:
        """Who serves, known after ``start``."""
        return "; ".join(engine.description for engine in self._engines)

    async def start(self) -> None:
        """All at once; the first that fails ends the others."""
        try:
            await first_failure(*(engine.start() for engine in self._engines))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await all_of(*(engine.stop() for engine in self._engines))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._main.generate(request)

    async def abort(self, request_id: str | None = None) -> None:
        await self._main.abort(request_id)

    async def pause(self) -> None:
        await all_of(*(engine.pause() for engine in self._engines))

    async def resume(self) -> None:
        await all_of(*(engine.resume() for engine in self._engines))

    async def join_trainer(self, address: str, word: str) -> None:
        if len(self._updated) > 1:
            raise InputError(
                "--weight-update-channel distributed with several models that get the trained weights: there is one "
                "process group with the trainer; use disk, or set update_weights false for all but one"
            )
        await self._main.join_trainer(address, word)

    async def begin_update(self, version: int) -> None:
        await all_of(*(engine.begin_update(version) for engine in self._updated))

    async def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await all_of(*(engine.update_weights(tensors) for engine in self._updated))

    async def commit_update(self, version: int) -> None:
        await all_of(*(engine.commit_update(version) for engine in self._updated))

    async def held_version(self) -> int | None:
        return await self._main.held_version()

    async def keep_weights(self, names: frozenset[str]) -> None:
        await all_of(*(engine.keep_weights(names) for engine in self._updated))

    async def fail_update(self, reason: str) -> None:
        await all_of(*(engine.fail_update(reason) for engine in self._updated))

    async def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        found = await all_of(*(engine.differing_weights(tensors) for engine in self._updated))
        return sorted({name for names in found for name in names})

    async def flush_cache(self) -> None:
        await all_of(*(engine.flush_cache() for engine in self._engines))

    async def release_memory(self, tags: tuple[str, ...] = (), timeout: float = MEMORY_TIMEOUT) -> None:
        await all_of(*(engine.release_memory(tags, timeout) for engine in self._engines))

    async def resume_memory(self, tags: tuple[str, ...] = ()) -> None:
        await all_of(*(engine.resume_memory(tags) for engine in self._engines))

    async def health(self) -> EngineHealth:
        """Of the model that answers; alive only where all are. Counts are of all together."""
        every: list[EngineHealth] = await all_of(*(engine.health() for engine in self._engines))
        main = every[self._engines.index(self._main)]
        counts = {name: sum(one.counts.get(name, 0.0) for one in every) for name in main.counts}
        detail = "; ".join(one.detail for one in every if one.detail)
        return replace(main, alive=all(one.alive for one in every), detail=detail, counts=counts)
