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
    weight_version: int | None = None  # of the weights that gave its first token

    @property
    def total(self) -> int:
        """Its longest possible length, prompt included, in tokens."""
        return len(self.request.input_ids) + self.limit

    @property
    def prefix(self) -> tuple[int, ...]:
        """What a prefill has to compute: the prompt, and after an interruption what was generated."""
        return self.request.input_ids + tuple(self.output_ids) if self.output_ids else self.request.input_ids

    def result(self, reason: FinishReason, text: str, weight_version: int) -> GenerateResult:
        return GenerateResult(
            request_id=self.request.request_id,
            output_ids=self.output_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            text=text,
            weight_version=weight_version if self.weight_version is None else self.weight_version,
            kept_token_ids=self.kept,
        )
