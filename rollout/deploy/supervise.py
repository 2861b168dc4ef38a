"""Runs a command that ends when its caller does: ``python supervise.py COMMAND...``, with a pipe as standard input.

The caller keeps the pipe's other end open for as long as the command is to run. However the caller ends, kill -9
included, the kernel closes that end; then, and on SIGTERM, the command's whole process group is ended: asked first, and
killed after ``GRACE`` seconds. A second process does that: Ray kills what a worker that it kills has started,
but not what that has started. The standard library alone: this file is run by itself, not as a part of our package.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds


def main() -> int:
    """The command's exit status, as a shell gives it."""
    # Ray's workers have signals blocked, and what they start inherits that: the command could only be killed.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    os.setsid()  # a Ctrl-C in the terminal is the caller's, which ends its servers in order
    front = os.getpid()
    guard = os.fork()
    return guarded(front) if guard == 0 else status_of(guard)


def status_of(guard: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(guard, signal.SIGTERM))
    return shown(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))


def guarded(front: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        watched = os.pidfd_open(front)
    except ProcessLookupError:
        return 0
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        select.select([sys.stdin.fileno(), watched, os.pidfd_open(child.pid)], [], [])
    finally:
        ended_by_itself = child.poll() is not None
        end(child)
    return shown(child.returncode) if ended_by_itself else 0


def shown(status: int) -> int:
    """As a shell gives it: 128 and more for a signal."""
    return status if status >= 0 else 128 - status


def end(child: subprocess.Popen) -> None:
    """End what is left of the child's group; the child itself may have ended before."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
