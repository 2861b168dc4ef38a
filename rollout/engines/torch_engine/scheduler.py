"""Which requests run: joining between decode steps, stepping together, leaving when they are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from rollout.engines.errors import EngineError
from rollout.engines.protocol import FinishReason, GenerateResult
from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.detokenize import Detokenizer
from rollout.engines.torch_engine.rows import Rows
from rollout.engines.torch_engine.sampling import Sampled, SamplingPlan, sample
from rollout.engines.torch_engine.sequence import Sequence
from rollout.engines.torch_engine.uniforms import uniforms

Answer = tuple[Sequence, GenerateResult | EngineError]


class Scheduler:
    """Requests wait in order of arrival and are admitted while rows and cache last; nobody overtakes.

    A request reserves cache for its longest possible length, so that what runs can always finish. Lives on the
    decoding thread.
    """

    def __init__(self, decoder: Decoder, detokenizer: Detokenizer, device: torch.device, max_running: int) -> None:
        self._decoder, self._detokenizer, self._device = decoder, detokenizer, device
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._rows = Rows(max_running, decoder.vocab_size, detokenizer)
        self._next = torch.zeros(max_running, dtype=torch.int64, device=device)  # the token that each row got last
        self._plan: SamplingPlan | None = None
        self._ended: list[tuple[Sequence, FinishReason | EngineError]] = []
        self.weight_version = -1
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.old_cache_tokens = 0  # drawn with keys and values of older weights in the cache
        self._broken_cache = False  # logits were not finite since the cache was dropped last: it may hold NaN

    @property
    def running(self) -> int:
        return self._rows.running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    def step(self) -> None:
        """Admit who fits and give them their first token, then one token to everybody who runs."""
        self._admit()
        rows = len(self._rows)
        if self._rows.running:
            logits = self._decoder.step(self._next[:rows])
            if self._plan is None:
                self._plan = self._plan_of(self._rows.sequences)
            self._advance(0, logits, self._plan)
        if rows and (not self._rows.running or 4 * (rows - self._rows.running) >= rows):
            self._close_gaps()

    def answers(self) -> list[Answer]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        texts = self._detokenizer.decode_batch([seq.output_ids for seq, _ in ended])
        return [
            (seq, end if isinstance(end, EngineError) else seq.result(end, text, self.weight_version))
            for (seq, end), text in zip(ended, texts, strict=True)
        ]

    def abort(self, sequences: SequenceOf[Sequence] | None = None) -> None:
        """End these requests, or all, with what they have."""
        chosen = None if sequences is None else set(map(id, sequences))
        rows = [
            i for i, seq in enumerate(self._rows.sequences) if seq is not None and (chosen is None or id(seq) in chosen)
        ]
        self._ended.extend((self._rows.remove(row), FinishReason.ABORT) for row in rows)
        self._decoder.retire(np.array(rows, dtype=np.int64))
        leaving = [seq for seq in self._waiting if chosen is None or id(seq) in chosen]
        self._ended.extend((seq, FinishReason.ABORT) for seq in leaving)
        if leaving:
            gone = set(map(id, leaving))
            self._waiting = deque(seq for seq in self._waiting if id(seq) not in gone)

    def interrupt(self) -> None:
        """End the requests that have tokens, with what they have."""
        everybody = [*self._rows.sequences, *(seq for seq in self._waiting if seq.output_ids)]
        self.abort([seq for seq in everybody if seq is not None])

    def change_weights(self, version: int, *, keep_cache: bool) -> None:
        """All weights are of ``version`` from here on. With ``keep_cache`` what runs goes on as it is; else, and where
        nothing runs that would have to be computed anew, everything cached is dropped."""
        self.weight_version = version
        if not (keep_cache and self._rows.running) or self._broken_cache:
            self.restart()
            return
        for row, seq in enumerate(self._rows.sequences):
            if seq is not None:
                seq.drawn_by(version, int(self._rows.generated[row]))
                self._rows.old_cache[row] = True

    def restart(self) -> None:
        """Drop everything cached; running requests go back to the head of the queue with what they have generated."""
        interrupted = [self._rows.remove(row) for row, seq in enumerate(self._rows.sequences) if seq is not None]
        self._waiting.extendleft(reversed(interrupted))
        self._rows.close_gaps()
        self._plan = None
        self._decoder.clear()
        self._broken_cache = False

    def _admit(self) -> None:
        newcomers: list[Sequence] = []
        longest = max((seq.total for seq in self._rows.sequences if seq is not None), default=0) if self._waiting else 0
        while self._waiting and self._rows.running + len(newcomers) < self._max_running:
            longest_then = max(longest, self._waiting[0].total)
            if not self._decoder.fits(self._rows.running + len(newcomers) + 1, longest_then):
                break
            longest = longest_then
            newcomers.append(self._waiting.popleft())
        if not newcomers:
            return
        if len(self._rows) > self._rows.running:
            self._close_gaps()
        prompts: dict[tuple[int, ...], int] = {}
        source = np.array([prompts.setdefault(seq.prefix, len(prompts)) for seq in newcomers])
        logits = self._decoder.admit(list(prompts), source, longest)
        self.prefill_tokens += sum(map(len, prompts))
        first = len(self._rows)
        self._rows.add(newcomers)
        self._plan = None
        for seq in newcomers:
            seq.drawn_by(self.weight_version, len(seq.output_ids))
        self._advance(first, logits, self._plan_of(newcomers))

    def _advance(self, first: int, logits: torch.Tensor, plan: SamplingPlan) -> None:
        """Sample for the rows from ``first`` on, write the tokens down and end what is done."""
        rows = self._rows
        span = slice(first, first + logits.shape[0])
        generated, alive = rows.generated[span], rows.alive[span]
        draws = uniforms(rows.keys[span], (rows.first_position[span] + generated).astype(np.uint64))
        forbidden = None
        early = generated < rows.minimum[span]
        if early.any():
            forbidden = torch.from_numpy(rows.stop_ids.table[rows.stop_line[span]] & early[:, None]).to(self._device)
        drawn = sample(logits, torch.from_numpy(draws).to(self._device), plan, forbidden)
        self._next[span] = drawn.tokens
        tokens, log_probs = drawn.tokens.cpu().numpy(), drawn.log_probs.cpu().numpy()
        index = np.arange(span.start, span.stop)
        rows.ids[index, generated] = tokens
        rows.log_probs[index, generated] = log_probs
        if drawn.kept is not None:
            self._record_kept(first, drawn)
        generated += alive
        self.generated_tokens += int(alive.sum())
        self.old_cache_tokens += int((alive & rows.old_cache[span]).sum())
        stopped = rows.stop_ids.table[rows.stop_line[span], tokens]
        if rows.watches:
            self._watch(first, tokens, stopped)
        stopped &= generated >= rows.minimum[span]
        broken = ~np.isfinite(log_probs)
        self._broken_cache |= bool((broken & alive).any())
        done = (stopped | broken | (generated >= rows.limit[span])) & alive
        offsets = np.flatnonzero(done)
        for offset in offsets.tolist():
            reason = FinishReason.STOP if stopped[offset] else FinishReason.LENGTH
            self._ended.append((rows.remove(first + offset), self._not_finite() if broken[offset] else reason))
        self._decoder.retire(first + offsets)

    def _watch(self, first: int, tokens: np.ndarray, stopped: np.ndarray) -> None:
        for row, watch in self._rows.watches.items():
            if first <= row < first + len(tokens) and watch.found(int(tokens[row - first])):
                stopped[row - first] = True

    def _record_kept(self, first: int, drawn: Sampled) -> None:
        assert drawn.kept is not None
        kept = drawn.kept.cpu().numpy()
        for offset in range(len(kept)):
            seq = self._rows.sequences[first + offset]
            if seq is not None and (seq.request.sampling.top_p < 1 or seq.request.sampling.top_k > 0):
                seq.kept = seq.kept if seq.kept is not None else []
                seq.kept.append(np.flatnonzero(kept[offset]).tolist())

    def _close_gaps(self) -> None:
        sources, targets = self._rows.close_gaps()
        self._decoder.move(sources, targets, len(self._rows))
        if len(sources):
            to_device = torch.from_numpy(targets).to(self._device)
            self._next[to_device] = self._next[torch.from_numpy(sources).to(self._device)]
        self._plan = None

    def _plan_of(self, sequences: SequenceOf[Sequence | None]) -> SamplingPlan:
        params = [None if seq is None else seq.request.sampling for seq in sequences]
        return SamplingPlan.of(params, self._decoder.vocab_size, self._device)

    def _not_finite(self) -> EngineError:
        where = f"the model gives logits that are not finite (weight version {self.weight_version})"
        if self.weight_version <= 0:  # nothing has been trained yet
            return EngineError(
                f"{where}, before any training: the weights in --hf-checkpoint are damaged, or too large for the "
                "number format; check that model, or try without --bf16"
            )
        return EngineError(
            f"{where}: its weights have diverged; look at train/grad_norm, lower --lr, or go back to an earlier "
            "checkpoint"
        )
