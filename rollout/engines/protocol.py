"""What every rollout engine does, embedded or served: one request in, one result out, weights replaced in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch

MEMORY_TAGS = ("weights", "kv_cache", "graphs")
MEMORY_TIMEOUT = 120.0  # seconds


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_new_tokens or the context ran out
    ABORT = "abort"  # aborted; the tokens generated so far are returned


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. ``temperature`` 0 is greedy (evaluation); training refuses it at the start."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to answer.

    The random numbers of its tokens are a function of (``seed``, ``rollout_id``, ``sample_index``, token position) and
    of nothing else: not of batch mates, launcher, retries or arrival time.
    """

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    rollout_id: int
    sample_index: int
    first_position: int = 0  # position of the first new token: above 0 when a partial response goes on


@dataclass(frozen=True)
class GenerateResult:
    """``output_ids`` and ``log_probs`` have one entry per new token (the token that ended the response included).

    ``log_probs`` are natural logarithms under the temperature-scaled distribution before top-p and top-k, as the
    trainer computes them, of the weights that drew the token. ``weight_version`` is that of the first token;
    ``weight_spans`` says (version, tokens) of each stretch where there may be several.
    ``kept_token_ids`` are the ids that top-p/top-k left, per token, when either is on.
    """

    request_id: str
    output_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    text: str
    weight_version: int
    kept_token_ids: list[list[int]] | None = None
    weight_spans: tuple[tuple[int, int], ...] | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each stretch of ``output_ids``."""
        return ((self.weight_version, len(self.output_ids)),) if self.weight_spans is None else self.weight_spans


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do; a capability is a field, so a misspelt one is an error."""

    returns_kept_token_ids: bool = False
    returns_routed_experts: bool = False
    frees_memory: bool = False
    keeps_requests_across_updates: bool = False  # PauseMode.RETRACT
    keeps_cache_across_updates: bool = False  # PauseMode.IN_PLACE


@dataclass(frozen=True)
class EngineHealth:
    alive: bool
    running: int  # requests in the decoding batch
    waiting: int  # requests not yet in it
    weight_version: int
    detail: str = ""
    weight_state: str = ""  # the version that answers, "updating-N" while N comes, "none" where one failed
    extra: Mapping[str, float] = field(default_factory=dict)  # figures for metrics, e.g. generated tokens so far
    counts: Mapping[str, float] = field(default_factory=dict)  # since the start, for metrics as engine/<name>


@runtime_checkable
class Engine(Protocol):
    """A rollout engine. All coroutines may be called from one event loop; none blocks it."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer the next request; -1 before the first commit of an update."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Abort what runs, end the threads and processes this engine started, within a bounded time."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request, exactly once. Cancelling the awaiting task aborts the request and frees its place."""
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; each is still answered, with what it has. An unknown id is no error."""
        ...

    async def pause(self) -> None:
        """Return once no forward pass runs; requests keep their place and new ones queue."""
        ...

    async def resume(self) -> None: ...

    async def begin_update(self, version: int) -> None:
        """Pause and make ready for the tensors of ``version``; no request is answered from half-new weights.

        What becomes of requests under way is the ``PauseMode`` that the engine was made with.
        """
        ...

    async def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a bucket of whole tensors under their Hugging Face names. An unknown name or another shape raises."""
        ...

    async def commit_update(self, version: int) -> None:
        """Check that every tensor arrived, drop caches that no request is to use any more, set ``weight_version`` and
        resume. Only here does a response change from one version to the next."""
        ...

    async def held_version(self) -> int | None:
        """The version of which every tensor is in place, so that an update may keep some; None: send all of them."""
        ...

    async def keep_weights(self, names: frozenset[str]) -> None:
        """Count tensors of ``held_version`` as part of the update under way. Raises where they are not in place."""
        ...

    async def fail_update(self, reason: str) -> None:
        """Answer nothing until a whole update has come: the one under way will not be, or was found to be wrong."""
        ...

    async def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of tensors (of the current version) that the engine holds differently."""
        ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, tags: tuple[str, ...] = (), timeout: float = MEMORY_TIMEOUT) -> None:
        """Give memory of ``MEMORY_TAGS`` (none given: of all) back; return once it is free. New requests are refused.

        ``graphs`` is what was prepared for decoding steps. Needs ``capabilities.frees_memory``.
        """
        ...

    async def resume_memory(self, tags: tuple[str, ...] = ()) -> None:
        """Take it again; requests are answered once all of it is back. Weights were not kept: a whole update follows.

        To be called with ``weights`` before the update, and with the rest when the trainer has given its memory back.
        """
        ...

    async def health(self) -> EngineHealth: ...


@runtime_checkable
class JoinsTrainer(Protocol):
    """An engine whose servers can take new weights from the trainer itself, over a process group with it."""

    async def join_trainer(self, address: str, word: str) -> None:
        """Find the trainer's first rank at ``address``; from here on updates are of tensors on the ``meta`` device."""
        ...
