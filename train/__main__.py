"""``python -m train``: parse, check, run the loop, say what was learned."""

from __future__ import annotations

import sys

from train.cli import run_guarded


def train() -> int:
    """``accelrl train`` from the first import of ours on, so that an interrupt ends any part of it the same way."""
    from train.safe_path import secure_sys_path

    secure_sys_path()

    from train.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run_guarded(train))
