"""The builder of MUSA kernels: here is no compiler for them, and whoever asks is told so at once."""

from __future__ import annotations

from typing import Any, NoReturn


def load(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"the emulated MUSA device runs host kernels only: {name} is not compiled for it")
