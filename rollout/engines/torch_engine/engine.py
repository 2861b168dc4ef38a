"""The embedded engine's asyncio face: requests in, futures out; the work is done on the decoding thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from accel.contract import Accelerator
from accel.memory.waiting import MemoryNotFreed
from rollout.engines.errors import EngineError
from rollout.engines.pausing import PauseMode
from rollout.engines.protocol import (
    MEMORY_TIMEOUT,
    EngineCapabilities,
    EngineHealth,
    GenerateRequest,
    GenerateResult,
)
from rollout.engines.torch_engine.decode_thread import DecodeThread
from rollout.engines.torch_engine.detokenize import Detokenizer
from rollout.engines.torch_engine.kv_cache import ROW_MULTIPLE
from rollout.engines.torch_engine.opening import (
    DecoderChoice,
    DecoderSettings,
    end_of_sequence_ids,
    open_config,
    open_decoder,
)
from rollout.engines.torch_engine.runner import Runner
from rollout.engines.torch_engine.scheduler import Answer, Scheduler
from rollout.engines.torch_engine.sequence import Sequence
from rollout.engines.torch_engine.uniforms import stream_key
from samples.errors import InputError, raised_at

T = TypeVar("T")

_STOP_TIMEOUT = 60.0  # seconds that the running forward pass may take to end


@dataclass(frozen=True)
class _Model:
    """What requests are checked against, known once the model is open."""

    vocab_size: int
    eos_ids: frozenset[int]
    largest: int  # tokens that the cache holds for one request
    description: str


class TorchEngine:
    """Serves one Hugging Face causal language model on one device of ``accelerator``.

    Requests handed in during one tick of the event loop join the batch together and in order, so that a run whose
    requests come in such waves computes the same batches, and the same numbers, every time. ``pause_mode`` says what
    becomes of responses under way when weights are updated; no keys and values are shared between requests that
    arrived under different weights in any mode.

    ``max_running_requests``: requests decoded at once. ``max_context_len``: prompt plus response, in tokens.
    ``max_total_tokens``: tokens that the cache holds, taken at start (None: it grows with what runs, up to half of the
    memory that is free at the start).
    ``threads``: CPU threads of the decoding thread (None: as torch has it).
    """

    capabilities = EngineCapabilities(
        returns_kept_token_ids=True,
        frees_memory=True,
        keeps_requests_across_updates=True,
        keeps_cache_across_updates=True,
    )

    def __init__(
        self,
        model_dir: Path,
        accelerator: Accelerator,
        *,
        dtype: torch.dtype,
        max_running_requests: int,
        max_context_len: int,
        max_total_tokens: int | None = None,
        load_weights: bool = True,
        threads: int | None = None,
        decoder: DecoderChoice = "auto",
        trust_remote_code: bool = False,
        pause_mode: PauseMode = PauseMode.RETRACT,
    ) -> None:
        self._pause_mode = pause_mode
        self._model_dir, self._accelerator = Path(model_dir), accelerator
        self._dtype, self._threads, self._decoder = dtype, threads, decoder
        self._max_running, self._max_len = max_running_requests, max_context_len
        self._max_total_tokens, self._load_weights = max_total_tokens, load_weights
        self._trust_remote_code = trust_remote_code
        self._device_index = accelerator.current_device()
        self._model: _Model | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: DecodeThread | None = None
        self._arrivals: list[Sequence] = []  # of this tick of the event loop
        self._active: dict[str, tuple[Sequence, asyncio.Future[GenerateResult]]] = {}
        self._calls: set[asyncio.Future] = set()
        self._failure: BaseException | None = None

    @property
    def weight_version(self) -> int:
        return self._thread.snapshot.weight_version if self._thread is not None else -1

    @property
    def description(self) -> str:
        """Which decoder serves the model, and why; known after ``start``."""
        return self._model.description if self._model is not None else "not started"

    async def start(self) -> None:
        """Open the model on the decoding thread; raises what kept it from opening."""
        if self._thread is not None:
            raise EngineError("the engine is started already")
        self._loop = asyncio.get_running_loop()
        self._failure = None
        thread = DecodeThread(self._open, self._deliver, self._thread_failed)
        self._thread = thread
        thread.start()
        try:
            await self._call(Runner.snapshot)  # answered once the model is open
        except EngineError as error:
            self._thread = None
            raise (error.__cause__ or error) from None

    async def stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        self._flush()
        thread.stop()
        if not await asyncio.to_thread(thread.join, _STOP_TIMEOUT):
            raise EngineError(
                f"the decoding thread has not ended within {_STOP_TIMEOUT:g} s: a forward pass hangs; "
                "the engine still owns it, stop() may be called again"
            )
        await asyncio.sleep(0)  # answers handed over by the thread's last step are set now
        self._thread = None
        self._fail_all(EngineError("the engine was stopped"))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sequence = self._accept(request)
        assert self._loop is not None
        future: asyncio.Future[GenerateResult] = self._loop.create_future()
        self._active[request.request_id] = (sequence, future)
        if not self._arrivals:
            self._loop.call_soon(self._flush)
        self._arrivals.append(sequence)
        try:
            return await future
        except asyncio.CancelledError:
            self._active.pop(request.request_id, None)
            self._order_abort([sequence])
            raise

    async def abort(self, request_id: str | None = None) -> None:
        if self._thread is None:
            return
        if request_id is None:
            self._order_abort(None)
        elif request_id in self._active:
            self._order_abort([self._active[request_id][0]])

    async def pause(self) -> None:
        await self._call(Runner.pause)

    async def resume(self) -> None:
        await self._call(Runner.resume)

    async def begin_update(self, version: int) -> None:
        await self._call(lambda runner: runner.begin_update(version))

    async def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._call(lambda runner: runner.update_weights(tensors))

    async def commit_update(self, version: int) -> None:
        await self._call(lambda runner: runner.commit_update(version))

    async def held_version(self) -> int | None:
        return await self._call(lambda runner: runner.held_version)

    async def keep_weights(self, names: frozenset[str]) -> None:
        await self._call(lambda runner: runner.keep_weights(names))

    async def fail_update(self, reason: str) -> None:
        await self._call(lambda runner: runner.fail_update(reason))

    async def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return await self._call(lambda runner: runner.differing_weights(tensors))

    async def flush_cache(self) -> None:
        await self._call(Runner.flush_cache)

    async def release_memory(self, tags: tuple[str, ...] = (), timeout: float = MEMORY_TIMEOUT) -> None:
        """Free memory of these tags, or all. MemoryNotFreed when it is not free after ``timeout`` seconds."""
        await self._call(lambda runner: runner.release_memory(tags, timeout))

    async def resume_memory(self, tags: tuple[str, ...] = ()) -> None:
        """Take the memory again. Released weights are not kept anywhere: a whole update has to follow."""
        await self._call(lambda runner: runner.resume_memory(tags))

    async def health(self) -> EngineHealth:
        if self._thread is None or self._failure is not None or not self._thread.alive:
            detail = f"failed: {self._failure!r}" if self._failure is not None else "not running"
            return EngineHealth(alive=False, running=0, waiting=0, weight_version=self.weight_version, detail=detail)
        now = self._thread.snapshot
        return EngineHealth(
            alive=True,
            running=now.running,
            waiting=now.waiting + len(self._arrivals),
            weight_version=now.weight_version,
            weight_state=now.weight_state,
            detail=now.detail,
            extra={"generated_tokens": now.generated_tokens, "prefill_tokens": now.prefill_tokens},
            counts={"old_cache_tokens": now.old_cache_tokens} if self._pause_mode is PauseMode.IN_PLACE else {},
        )

    def _accept(self, request: GenerateRequest) -> Sequence:
        """Check a request and make it a sequence. Raises InputError for a bad one, EngineError when none are taken."""
        thread = self._started()
        if thread.snapshot.refusal:
            raise EngineError(f"request {request.request_id}: {thread.snapshot.refusal}")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError(
                f"request {request.request_id}: it comes from another event loop than the one start() ran on"
            )
        assert self._model is not None
        if request.request_id in self._active:
            raise InputError(f"request {request.request_id}: a request with this id is running already")
        params, prompt = request.sampling, request.input_ids
        limit = min(params.max_new_tokens, self._max_len - len(prompt))
        problem = _problem(request, self._model.vocab_size)
        if problem is None and limit < 1:
            problem = f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._max_len}"
        if problem is None and len(prompt) + limit > self._model.largest:
            problem = (
                f"its {len(prompt)} + {limit} tokens can never fit the cache of {self._model.largest}: raise "
                "--engine-max-total-tokens or lower --rollout-max-response-len"
            )
        if problem is not None:
            raise InputError(f"request {request.request_id}: {problem}")
        stop_ids = frozenset(params.stop_token_ids)
        return Sequence(
            request=request,
            limit=limit,
            key=stream_key(request.seed, request.rollout_id, request.sample_index),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self._model.eos_ids,
        )

    def _flush(self) -> None:
        """Hand the requests of this tick to the thread as one batch."""
        if self._arrivals and self._thread is not None:
            arrivals, self._arrivals = self._arrivals, []
            self._thread.order(lambda runner: runner.submit(arrivals))

    def _order_abort(self, sequences: list[Sequence] | None) -> None:
        self._flush()
        if self._thread is not None:
            self._thread.order(lambda runner: runner.abort(sequences))

    async def _call(self, action: Callable[[Runner], T]) -> T:
        """Run ``action`` on the decoding thread, between forward passes; its result or its exception comes back."""
        thread, loop = self._started(), asyncio.get_running_loop()
        self._flush()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def order(runner: Runner) -> Callable[[], None]:
            try:
                settle = _settler(future, action(runner), None)
            except (InputError, EngineError, MemoryNotFreed) as error:  # not the thread's: it goes on
                settle = _settler(future, None, error)

            def complete() -> None:
                loop.call_soon_threadsafe(settle)

            return complete

        thread.order(order)
        return await future

    def _started(self) -> DecodeThread:
        if self._failure is not None:
            raise EngineError(f"the decoding thread has failed: {self._failure!r}") from self._failure
        if self._thread is None:
            raise EngineError("the engine is not running: call start() first")
        return self._thread

    def _deliver(self, answers: list[Answer]) -> None:
        """On the decoding thread: one wake-up of the event loop for all answers of a step."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._set_answers, answers)

    def _set_answers(self, answers: list[Answer]) -> None:
        for sequence, answer in answers:
            known, future = self._active.get(sequence.request.request_id, (None, None))
            if known is not sequence or future is None:
                continue  # cancelled meanwhile
            del self._active[sequence.request.request_id]
            if future.done():
                continue
            if isinstance(answer, GenerateResult):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def _thread_failed(self, error: BaseException) -> None:
        """On the decoding thread, as its last act."""
        assert self._loop is not None
        self._failure = error
        self._loop.call_soon_threadsafe(self._report_failure, error)

    def _report_failure(self, error: BaseException) -> None:
        failure = EngineError(f"the decoding thread has failed: {error!r}{raised_at(error)}")
        failure.__cause__ = error
        self._fail_all(failure)

    def _fail_all(self, error: EngineError) -> None:
        self._arrivals.clear()
        futures = [future for _, future in self._active.values()] + list(self._calls)
        self._active.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _open(self) -> Runner:
        """On the decoding thread: the model, its tokenizer and the scheduler."""
        from samples.tokenizer import load_tokenizer

        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._accelerator.set_device(self._device_index)
        config = open_config(self._model_dir, self._trust_remote_code)
        tokenizer = load_tokenizer(self._model_dir, trust_remote_code=self._trust_remote_code)
        settings = DecoderSettings(
            model_dir=self._model_dir,
            dtype=self._dtype,
            device=self._accelerator.device(self._device_index),
            max_rows=self._max_running,
            max_len=self._max_len,
            max_total_tokens=self._max_total_tokens,
            free_memory=self._accelerator.memory_info(self._device_index).free,
            threads=torch.get_num_threads(),
            load_weights=self._load_weights,
            choice=self._decoder,
            trust_remote_code=self._trust_remote_code,
        )
        decoder, description = open_decoder(config, settings)
        self._model = _Model(
            vocab_size=decoder.vocab_size,
            eos_ids=end_of_sequence_ids(self._model_dir, config, tokenizer),
            largest=min(self._max_len, decoder.cache_tokens // ROW_MULTIPLE * ROW_MULTIPLE),
            description=description,
        )
        scheduler = Scheduler(decoder, Detokenizer(tokenizer), settings.device, self._max_running)
        return Runner(decoder, scheduler, self._accelerator, loaded=self._load_weights, pause_mode=self._pause_mode)


def _settler(future: asyncio.Future, result: object, error: Exception | None) -> Callable[[], None]:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    return settle


def _problem(request: GenerateRequest, vocab_size: int) -> str | None:
    """What is wrong with a request's own numbers, or None."""
    params, prompt = request.sampling, request.input_ids
    if not prompt:
        return "input_ids is empty: a prompt needs at least one token"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"input_ids go from {min(prompt)} to {max(prompt)}, but the model's vocabulary has {vocab_size} tokens"
    if params.max_new_tokens < 1:
        return f"max_new_tokens {params.max_new_tokens}: give 1 or more"
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        return f"min_new_tokens {params.min_new_tokens} is not between 0 and max_new_tokens {params.max_new_tokens}"
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        return f"temperature {params.temperature}: give 0 (greedy) or a positive number"
    if not 0 < params.top_p <= 1:
        return f"top_p {params.top_p}: give a number above 0, up to 1"
    if params.top_k != -1 and params.top_k < 1:
        return f"top_k {params.top_k}: give -1 (all) or a positive number"
    if "" in params.stop:
        return "stop has an empty string"
    return None
