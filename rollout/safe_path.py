"""``accel.safe_path`` for this package, found by file: ``import accel`` might still find a folder of the user's."""

from __future__ import annotations

import runpy
from pathlib import Path


def secure_sys_path() -> None:
    """Called before anything else of ours is imported; see ``accel/safe_path.py``."""
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "accel" / "safe_path.py"))["secure_sys_path"]()
