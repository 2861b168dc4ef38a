"""Sets up the CPU environment of SGLang and its router: ``python ci/sglang_cpu/install.py`` (``make sglang-cpu``).

The environment is a virtual one of its own, since SGLang pins versions that training does not. It lies in the user's
cache, under a name made from everything in this folder and from the Python version, so that every checkout of the same
state shares it and a changed pin makes a new one. ``.venv-sglang`` of this checkout leads to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINK = HERE.parents[1] / ".venv-sglang"
TORCH = "torch==2.13.0"  # by exact version and first: a range may pull a build for another accelerator
SGLANG = ("sglang==0.5.23", "sglang-router==0.3.2")
ROUTER_NEEDS = ("aiohttp", "fastapi", "orjson", "setproctitle", "uvicorn")
CHECK = "import torchvision, sglang.srt.server_args, sglang_router.launch_router"


def main() -> int:
    target = cache_directory() / f"sglang-cpu-{fingerprint()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:  # another checkout may be at the same work
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / ".complete").exists():
            print(f"sglang-cpu: {target} is there", flush=True)
        else:
            install(target)
    if not (LINK.is_symlink() and LINK.resolve() == target.resolve()):
        if LINK.is_dir() and not LINK.is_symlink():
            raise SystemExit(f"{LINK} is a directory; it has to become a link: remove it and run this again")
        LINK.unlink(missing_ok=True)
        LINK.symlink_to(target, target_is_directory=True)
    print(f"sglang-cpu: use it with --sglang-python {LINK / 'bin' / 'python'}", flush=True)
    return 0


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelrl"


def fingerprint() -> str:
    """Of this folder's files and the Python that runs it."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {TORCH} {SGLANG}".encode())
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def install(target: Path) -> None:
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"sglang-cpu: the pins are for Python 3.11, this is {sys.version.split()[0]}")
    started = time.monotonic()
    print(f"sglang-cpu: installing into {target} (some minutes, 3.5 GB)", flush=True)
    shutil.rmtree(target, ignore_errors=True)  # what an interrupted installation left
    venv.create(target, with_pip=True, symlinks=True)
    constraints = ("-c", str(HERE / "constraints.txt"))
    pip(target, *constraints, TORCH)
    pip(target, *constraints, "-r", str(HERE / "requirements.txt"), *ROUTER_NEEDS)
    pip(target, "--no-deps", *SGLANG)
    (site_packages,) = (target / "lib").glob("python*/site-packages")
    shutil.copytree(HERE / "shim", site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [target / "bin" / "python", "-c", CHECK], check=True, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    )
    (target / ".complete").touch()
    print(f"sglang-cpu: installed after {time.monotonic() - started:.0f} s", flush=True)


def pip(target: Path, *arguments: str) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = [target / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, *arguments, *extra], check=True)


if __name__ == "__main__":
    sys.exit(main())
