"""Runs one job of ci/matrix.toml on this machine: ``python ci/run_job.py NAME``, or ``--no-hardware`` for all such."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from matrix import ROOT, Job, load


def main() -> int:
    jobs = load()
    parser = argparse.ArgumentParser(description="Run jobs of ci/matrix.toml here.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(jobs))
    parser.add_argument("--no-hardware", action="store_true", help="every job that runs on any machine")
    parser.add_argument("--list", action="store_true", help="print the jobs and what they need")
    options = parser.parse_args()
    if options.list:
        for job in jobs.values():
            print(f"{job.name:<14} {job.hardware}")
        return 0
    free = [name for name, job in jobs.items() if options.no_hardware and not job.needs_hardware]
    chosen = [job for name, job in jobs.items() if name in options.names or name in free]
    unknown = [name for name in options.names if name not in jobs]
    if unknown or not chosen:
        parser.error(f"no job is named {unknown[0]!r}" if unknown else "name a job, or give --no-hardware")
    for job in chosen:
        status = run(job)
        if status:
            return status
    return 0


def run(job: Job) -> int:
    """0, or the status of the first command that failed."""
    environment = os.environ | job.environment
    spent = []
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    for command in job.all_commands():
        print(f"=== job {job.name}: {command}", flush=True)
        started = time.monotonic()
        status = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=False).returncode
        spent.append(f"{time.monotonic() - started:4.0f} s  {command}")
        print(f"=== job {job.name}: status {status} after {time.monotonic() - started:.0f} s", flush=True)
        if status:
            return status
    print("\n".join([f"=== job {job.name} passed:", *spent]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
