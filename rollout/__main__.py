"""``python -m rollout``."""

from __future__ import annotations

import sys

from rollout.safe_path import secure_sys_path

secure_sys_path()

from rollout.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
