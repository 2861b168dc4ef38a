"""What contract tests run on: an engine that needs no model, a tokenizer, and samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.protocol import (
    MEMORY_TIMEOUT,
    EngineCapabilities,
    EngineHealth,
    FinishReason,
    GenerateRequest,
    GenerateResult,
)
from samples.sample import Group, Sample, Status


class EchoTokenizer:
    """One token a character: its code point."""

    chat_template = None
    bos_token_id = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class EchoEngine:
    """An engine that answers with the last ``length`` tokens of what it is given, at once and always the same."""

    capabilities = EngineCapabilities()

    def __init__(self, length: int = 2) -> None:
        self.weight_version = 0
        self.requests: list[GenerateRequest] = []
        self._length = length

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        count = min(self._length, request.sampling.max_new_tokens)
        ids = list(request.input_ids[-count:])
        reason = FinishReason.STOP if count == self._length else FinishReason.LENGTH
        text = EchoTokenizer().decode(ids)
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), reason, text, self.weight_version)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def abort(self, request_id: str | None = None) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def begin_update(self, version: int) -> None: ...

    async def update_weights(self, tensors: Any) -> None: ...

    async def commit_update(self, version: int) -> None:
        self.weight_version = version

    async def held_version(self) -> int | None:
        return None

    async def keep_weights(self, names: frozenset[str]) -> None: ...

    async def fail_update(self, reason: str) -> None: ...

    async def differing_weights(self, tensors: Any) -> list[str]:  # noqa: ARG002 - it has none
        return []

    async def flush_cache(self) -> None: ...

    async def release_memory(self, tags: tuple[str, ...] = (), timeout: float = MEMORY_TIMEOUT) -> None: ...

    async def resume_memory(self, tags: tuple[str, ...] = ()) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(alive=True, running=0, waiting=0, weight_version=self.weight_version)


def example_args(**settings: Any) -> SimpleNamespace:
    """The ``args`` of a run with default settings, and ``settings`` on top."""
    values: dict[str, Any] = {}
    for section in (RolloutConfig(), RewardConfig()):
        values |= {name: getattr(section, name) for name in type(section).model_fields}
    return SimpleNamespace(**(values | settings))


def example_groups(groups: int = 2, size: int = 3, *, answered: bool = True, scored: bool = False) -> list[Group]:
    """Groups of sums to be answered, or ``answered``: right, wrong, cut off; with ``scored`` rewards, 1 if right."""
    made: list[Group] = []
    for number in range(groups):
        prompt, label = f"{number} + {number} =", str(2 * number)
        group = []
        for place in range(size):
            tokens = [ord(character) for character in prompt]
            sample = Sample(
                prompt=prompt, tokens=tokens, label=label, index=number * size + place, group_index=number,
                rollout_id=0, prompt_row=number, epoch=0, metadata={"task": "sum"},
            )  # fmt: skip
            if answered:
                _answer(sample, [label, "wrong", "0"][place % 3], place)
                if scored:
                    sample.reward = float(sample.response == label)
            group.append(sample)
        made.append(group)
    return made


def _answer(sample: Sample, response: str, place: int) -> None:
    ids = [ord(character) for character in response]
    sample.tokens = sample.tokens + ids
    sample.response, sample.response_length = response, len(ids)
    sample.rollout_log_probs = [-0.5] * len(ids)
    sample.loss_mask = [1] * len(ids)
    sample.status = Status.TRUNCATED if place % 3 == 2 else Status.COMPLETED
    sample.weight_version = sample.last_weight_version = 0
