"""All benchmarks, one after the other: ``python -m benchmarks [NAME ...] [--json-dir DIR]`` (``make bench``)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

# In order of how long they take; each is a module of its own with flags of its own. The arguments are for a run of all.
BENCHMARKS: dict[str, list[str]] = {
    "sample_hooks": [],
    "async_rollout": [],
    "process_groups": [],
    "offload": [],
    "weight_update": [],
    "model_io": [],
    "decode": ["--threads", "1"],
    "train_step": [],
    "startup": [],
    "rl_step": [],
    "time_to_reward": [],
    "example_study": ["--settings", "default", "no entropy bonus", "learning rate 3e-3"],
}


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    flags.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all): {', '.join(BENCHMARKS)}")
    flags.add_argument("--json-dir", type=Path, default=None, metavar="DIR", help="write each one's results there")
    args = flags.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        flags.error(f"{unknown[0]}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    if args.json_dir is not None:
        args.json_dir.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name]]
        if args.json_dir is not None and name != "sample_hooks":
            command += ["--json", str((args.json_dir / f"{name}.json").resolve())]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
