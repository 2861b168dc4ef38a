"""Token ids to text: whole responses at once, and one token at a time where stop strings are watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """A Hugging Face tokenizer's way back to text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer decodes a batch in one call; the Python wrapper adds only the clean-up of spaces to it.
        self._batch = None
        if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
            self._batch = tokenizer.backend_tokenizer

    def decode_batch(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """The text of each response; equal ones are decoded once."""
        keys = [tuple(ids) for ids in responses]
        distinct = list(dict.fromkeys(keys))
        if self._batch is None:
            decoded = [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in distinct]
        else:
            decoded = self._batch.decode_batch(distinct, skip_special_tokens=True)
        texts = dict(zip(distinct, decoded, strict=True))
        return [texts[key] for key in keys]

    def decode_all(self, ids: Sequence[int]) -> str:
        """Special tokens included: a stop string may be one."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class StopStringWatch:
    """Follows one response token by token and says when one of its stop strings has appeared.

    Text is taken from a window of the last tokens: what the window adds when a token joins it. A token that ends
    half-way through a character adds nothing until the character is whole. Only as much text is kept as a stop
    string may still straddle.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._overlap = max(len(stop) for stop in stops) - 1
        self._window: list[int] = []
        self._read = 0  # how many tokens of the window have given their text
        self._tail = ""

    def found(self, token: int) -> bool:
        """Add a token; True when a stop string is in the text that ends with it."""
        self._window.append(token)
        before = self._detokenizer.decode_all(self._window[: self._read])
        now = self._detokenizer.decode_all(self._window)
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return False
        text = self._tail + now[len(before) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._tail = text[-self._overlap :] if self._overlap else ""
        return any(stop in text for stop in self._stops)
