"""One request inside the engine, from arrival to answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.engines.protocol import FinishReason, GenerateRequest, GenerateResult


@dataclass(eq=False)
class Sequence:
    """``limit`` is how many new tokens it may get (``max_new_tokens``, or what the context leaves)."""

    request: GenerateRequest
    limit: int
    key: int  # state of its stream of random numbers
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)  # filled when it leaves the batch
    log_probs: list[float] = field(default_factory=list)
    kept: list[list[int]] | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, token from which on its weights draw)

    @property
    def total(self) -> int:
        """Its longest possible length, prompt included, in tokens."""
        return len(self.request.input_ids) + self.limit

    @property
    def prefix(self) -> tuple[int, ...]:
        """What a prefill has to compute: the prompt, and after an interruption what was generated."""
        return self.request.input_ids + tuple(self.output_ids) if self.output_ids else self.request.input_ids

    def drawn_by(self, version: int, tokens: int) -> None:
        """The weights ``version`` draw what comes after the first ``tokens``."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, tokens))

    def spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each stretch of what was generated."""
        ends = [start for _, start in self.versions[1:]] + [len(self.output_ids)]
        stretches = ((version, end - start) for (version, start), end in zip(self.versions, ends, strict=True))
        return tuple((version, tokens) for version, tokens in stretches if tokens)

    def result(self, reason: FinishReason, text: str, weight_version: int) -> GenerateResult:
        """``weight_version``: of the weights that would draw its first token, where there is none."""
        spans = self.spans() if self.versions else ()
        return GenerateResult(
            request_id=self.request.request_id,
            output_ids=self.output_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            text=text,
            weight_version=spans[0][0] if spans else weight_version,
            kept_token_ids=self.kept,
            weight_spans=spans,
        )
