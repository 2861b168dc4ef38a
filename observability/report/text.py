"""Text that a model or a user's file brought along, made safe for a page: it is shown, never interpreted."""

from __future__ import annotations

import unicodedata
from html import escape

_KEPT = "\n\t"


def shown(text: str) -> str:
    """HTML for ``text``: escaped, with what has no glyph (controls, text direction, surrogates) as a marked code."""
    return "".join(
        f'<span class="code">{_name(c)}</span>' if _invisible(c) else escape(c) for c in text.replace("\r\n", "\n")
    )


def _invisible(character: str) -> bool:
    if character in _KEPT or (character.isascii() and character.isprintable()):
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _name(character: str) -> str:
    point = ord(character)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
