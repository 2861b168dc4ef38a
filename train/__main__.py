"""``python -m train``: parse, check, run the loop, say what was learned."""

from __future__ import annotations

import sys

from train.safe_path import secure_sys_path

secure_sys_path()

from train.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
