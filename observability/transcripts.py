"""What the model wrote: a few samples of a step, of a bounded number of steps, in a file that a person can read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, cast

from observability.rollout_metrics import leaves_of
from observability.trackers import write_all
from samples.errors import InputError
from samples.sample import Message, Sample

Transcript = dict[str, Any]

MAX_CHARACTERS = 4000  # of a prompt or response; the middle of a longer one is left out
MAX_MESSAGES = 32  # of a chat prompt, the last ones
LATEST = 4  # steps at the end that are always kept


def pick_transcripts(groups: Iterable[Iterable[Any]], count: int, reward_key: str | None = None) -> list[Transcript]:
    """The best and the worst of all scored samples as JSON-ready mappings: ``count`` of them, the better half first.

    The choice depends on rewards and indices only. Different prompts come before second samples of one prompt.
    """
    scored = [sample for group in groups for sample in leaves_of(group) if sample.reward is not None]
    by_rank = sorted(scored, key=lambda sample: (-_order(sample, reward_key), sample.index or 0))
    best = _distinct(by_rank, min(len(scored) + 1, count + 1) // 2)
    taken = {id(sample) for sample in best}
    worst = _distinct([sample for sample in reversed(by_rank) if id(sample) not in taken], count - len(best))
    return [_transcript(sample, "best", reward_key) for sample in best] + [
        _transcript(sample, "worst", reward_key) for sample in reversed(worst)
    ]


def _order(sample: Sample, reward_key: str | None) -> float:
    reward = sample.reward_value(reward_key)
    return reward if not math.isnan(reward) else -math.inf


def _distinct(ranked: Sequence[Sample], count: int) -> list[Sample]:
    """The first ``count`` of ``ranked``, as far as possible no two of one group; in the order of ``ranked``."""
    seen: set[int | None] = set()
    first_of_group: list[tuple[int, Sample]] = []
    others: list[tuple[int, Sample]] = []
    for place, sample in enumerate(ranked):
        (others if sample.group_index in seen else first_of_group).append((place, sample))
        seen.add(sample.group_index)
    chosen = sorted([*first_of_group, *others][:count], key=lambda item: item[0])
    return [sample for _, sample in chosen]


def _transcript(sample: Sample, rank: str, reward_key: str | None) -> Transcript:
    reward = sample.reward_value(reward_key)
    return {
        "rank": rank,
        "reward": reward if math.isfinite(reward) else str(reward),
        "status": sample.status.value,
        "response_length": sample.response_length,
        "index": sample.index,
        "group_index": sample.group_index,
        "weight_version": sample.weight_version,
        "source": sample.source,
        "prompt": _prompt(sample.prompt),
        "response": shorten(sample.response),
        "label": None if sample.label is None else shorten(str(sample.label), 400),
    }


def _prompt(prompt: str | list[Message]) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        return shorten(prompt)
    return [
        {"role": shorten(str(message.get("role", "")), 40), "content": shorten(_content(message.get("content")))}
        for message in prompt[-MAX_MESSAGES:]
    ]


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """``text``, or its beginning and end with a note of how much was left out between them."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


class Transcripts:
    """Keeps transcripts of at most twice ``max_steps`` steps in ``path``, one JSON object a line with its ``step``.

    Every step is appended, so that the latest are there after a kill. When the file holds too many, it is written anew
    with ``max_steps``: the first, the last ``LATEST``, and those between that are multiples of one power of two, the
    same ones time after time. A step that was made before (by a run that goes on from a checkpoint) takes the place of
    the old one and of all after it.
    """

    def __init__(self, path: str | Path, *, max_steps: int = 24) -> None:
        if max_steps < LATEST + 2:
            raise ValueError(f"max_steps is {max_steps}; it must be at least {LATEST + 2}")
        self.path = Path(path)
        self._max_steps = max_steps
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._kept = by_step(read_transcripts(self.path)) if self.path.exists() else {}
        self._file = self._rewritten()

    def add(self, step: int, transcripts: Sequence[Transcript]) -> None:
        if not transcripts:
            return
        made_before = [kept for kept in self._kept if kept >= step]
        for kept in made_before:
            del self._kept[kept]
        self._kept[step] = [{"step": step, **transcript} for transcript in transcripts]
        thin_out = len(self._kept) > 2 * self._max_steps
        if thin_out:
            self._kept = {kept: self._kept[kept] for kept in choose_steps(list(self._kept), self._max_steps)}
        if thin_out or made_before:
            self._file.close()
            self._file = self._rewritten()
        else:
            write_all(self._file, _lines(self._kept[step]), self.path)

    def close(self) -> None:
        self._file.close()

    def _rewritten(self) -> FileIO:
        """A new file with what is kept in place of the old one, open for appending."""
        unfinished = self.path.with_name(self.path.name + ".part")
        with unfinished.open("wb", buffering=0) as file:
            write_all(file, b"".join(_lines(samples) for samples in self._kept.values()), self.path)
        os.replace(unfinished, self.path)
        return self.path.open("ab", buffering=0)


def choose_steps(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of ascending ``steps``: the first, the last ``LATEST``, and multiples of a power of two."""
    stride = 1
    while True:
        chosen = [step for i, step in enumerate(steps) if i == 0 or i >= len(steps) - LATEST or step % stride == 0]
        if len(chosen) <= count:
            return chosen
        stride *= 2


def read_transcripts(path: Path) -> list[Transcript]:
    """The whole lines of a file of ``Transcripts``; one that was cut off by a kill is left out.

    Raises InputError, naming file and line, for one that is no transcript.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read(path: Path, number: int, line: bytes) -> Transcript:
    try:
        transcript = json.loads(line)
    except (ValueError, RecursionError):
        transcript = None
    if not _is_transcript(transcript):
        raise InputError(f"{path}, line {number}: is no transcript; remove the line")
    return cast(Transcript, transcript)


def _is_transcript(value: object) -> bool:
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return False
    texts = (value.get("prompt", ""), value.get("response", ""), value.get("label") or "")
    if all(isinstance(text, str) for text in texts):
        return True
    prompt, *others = texts
    messages = prompt if isinstance(prompt, list) else [None]
    return all(isinstance(text, str) for text in others) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )


def by_step(transcripts: Iterable[Transcript]) -> dict[int, list[Transcript]]:
    """Transcripts by the step that they belong to, in their order."""
    steps: dict[int, list[Transcript]] = {}
    for transcript in transcripts:
        steps.setdefault(int(transcript["step"]), []).append(transcript)
    return steps


def _lines(transcripts: Sequence[Transcript]) -> bytes:
    return b"".join(json.dumps(transcript, allow_nan=False).encode() + b"\n" for transcript in transcripts)
