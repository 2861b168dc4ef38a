"""Credentials in text that others will see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"

_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;][\w-]*(?:key|token|secret|passw|signature|credential|sig|auth)[\w-]*=)[^\s&;\"'<>]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """``text`` with the user part of addresses, and parameters of theirs that are named like a secret, hidden."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def redacted(value: Any) -> Any:
    """``value`` with every text in its mappings and lists redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value
