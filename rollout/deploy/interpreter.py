"""Which Python runs SGLang: it lives in an environment of its own wherever its pins and training's differ."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from samples.errors import InputError

_NEEDED = ("sglang", "sglang_router")
_CHECKOUT = Path(__file__).resolve().parents[2]
_CPU_ENVIRONMENT = _CHECKOUT / ".venv-sglang" / "bin" / "python"  # what `make sglang-cpu` leads to


def sglang_python(given: str | None) -> Path:
    """``--sglang-python``, else this interpreter where SGLang is installed, else that of ``make sglang-cpu``."""
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise InputError(f"--sglang-python {given}: there is no such file; give the Python that has SGLang")
        return path.absolute()  # not resolved: a virtual environment's Python is a link, and is known by its place
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    if _CPU_ENVIRONMENT.is_file():
        return _CPU_ENVIRONMENT
    raise InputError(
        "--rollout-engine sglang: SGLang is not installed here; give --sglang-python, the Python that has it, or on a "
        "machine without accelerators run `make sglang-cpu` first"
    )


def check_interpreter(python: Path) -> None:
    """InputError unless SGLang and its router are installed for ``python``; they are looked for, not imported."""
    code = f"import importlib.util as u; print([n for n in {_NEEDED!r} if u.find_spec(n) is None])"
    try:
        done = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise InputError(f"--sglang-python {python}: cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise InputError(f"--sglang-python {python}: is no Python that works: {done.stderr.strip()[-300:]}")
    if done.stdout.strip() != "[]":
        raise InputError(
            f"--sglang-python {python}: lacks {done.stdout.strip()}; install sglang 0.5.23 and sglang-router 0.3.2"
        )
