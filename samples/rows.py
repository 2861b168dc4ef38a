"""Turn one row of a prompt file into a prompt, or say what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samples.config import DataConfig
from samples.sample import Message

_SHOWN_KEYS = 12
_SHOWN_VALUE = 60


class RowError(ValueError):
    """What is wrong with a row; whoever knows the file and the line adds them. ``kind`` says it for a count of rows."""

    kind = "unusable"


class NotJson(RowError):
    kind = "not JSON"


class NoText(RowError):
    kind = "with broken text"


class BadPrompt(RowError):
    kind = "without a usable prompt"


class BadLabel(RowError):
    kind = "without a usable label"


class BadMetadata(RowError):
    kind = "with unusable metadata"


class BadSource(RowError):
    kind = "without a usable source"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One usable row: what the model is asked, and what goes along with the sample."""

    prompt: str | list[Message]
    label: Any = None
    metadata: dict[str, Any] | None = None  # None: the row has none
    source: str | None = None


@dataclass(frozen=True)
class RowFields:
    """Which fields of a row are what (``--input-key`` and its siblings)."""

    input_key: str
    label_key: str | None
    metadata_key: str | None
    source_key: str | None

    @classmethod
    def of(cls, config: DataConfig) -> RowFields:
        return cls(config.input_key, config.label_key, config.metadata_key, config.source_key)

    def names(self) -> list[str]:
        """The fields read, each once."""
        named = (self.input_key, self.label_key, self.metadata_key, self.source_key)
        return list(dict.fromkeys(name for name in named if name is not None))

    def read(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt in ``row``. Raises RowError naming the field, the keys that are there and the flag to change."""
        prompt = _required(row, self.input_key, "--input-key", BadPrompt)
        _check_prompt(prompt, self.input_key)
        label = None if self.label_key is None else _label(row, self.label_key)
        metadata = None if self.metadata_key is None else row.get(self.metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            flag = "--metadata-key names another field, 'none' reads none"
            raise BadMetadata(f"field {self.metadata_key!r} is {_show(metadata)}, expected a mapping ({flag})")
        source = None if self.source_key is None else _source(row, self.source_key)
        return Prompt(prompt, label, metadata, source)


def check_encodable(prompt: Prompt) -> None:
    """Refuse half surrogate pairs ("\\ud800"), which JSON can spell and UTF-8, and so a tokenizer, cannot."""
    for name in ("prompt", "label", "metadata", "source"):
        try:
            json.dumps(getattr(prompt, name), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise NoText(f"the {name} holds half of a surrogate pair, which is no text ({error.reason})") from None


def _required(row: Mapping[str, Any], key: str, flag: str, error: type[RowError]) -> Any:
    value = row.get(key)
    if value is not None:
        return value
    if key in row:
        raise error(f"field {key!r} is null ({flag} names another field)")
    keys = sorted(map(repr, row))
    there = ", ".join(keys[:_SHOWN_KEYS]) + (", …" if len(keys) > _SHOWN_KEYS else "")
    raise error(f"field {key!r} is missing; there are {there or 'no fields'} ({flag} names the field to read)")


def _check_prompt(prompt: Any, key: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadPrompt(f"field {key!r} is an empty prompt")
        return
    if not isinstance(prompt, list):
        raise BadPrompt(f"field {key!r} is {_show(prompt)}, expected text or a list of chat messages (--input-key)")
    if not prompt:
        raise BadPrompt(f"field {key!r} is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        _check_message(message, f"field {key!r}, message {number}")
    if not any(_says_something(message) for message in prompt):
        raise BadPrompt(f"field {key!r} is an empty prompt: every message has an empty content")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise BadPrompt(f"{where} is {_show(message)}, expected an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadPrompt(f"{where}: 'role' is {_show(role) if 'role' in message else 'missing'}, expected a name")
    if "content" not in message:
        raise BadPrompt(f"{where}: 'content' is missing")
    content = message["content"]
    # A message that only calls tools has no content; a list holds parts, which the chat template renders.
    if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
        raise BadPrompt(f"{where}: 'content' is {_show(content)}, expected text or a list of parts")


def _says_something(message: Message) -> bool:
    content = message["content"]
    return bool(content.strip()) if isinstance(content, str) else bool(content or message.get("tool_calls"))


def _label(row: Mapping[str, Any], key: str) -> Any:
    label = _required(row, key, "--label-key ('none': no label)", BadLabel)
    if isinstance(label, float) and not math.isfinite(label):
        raise BadLabel(f"field {key!r} is {label}, which is no label")
    return label


def _source(row: Mapping[str, Any], key: str) -> str:
    source = _required(row, key, "--source-key", BadSource)
    if not isinstance(source, str) or not source.strip():
        raise BadSource(f"field {key!r} is {_show(source)}, expected a name (--source-key names another field)")
    return source


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN_VALUE else text[:_SHOWN_VALUE] + '…'}"
