"""The console script ``accelrl``, and how every command of ours ends on an error."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

COMMANDS = {  # "module:function", function(argv) -> exit status; imported only when asked for
    "train": ("train.main:main", "train a model; with no flags, a small built-in example"),
    "accel": ("accel.__main__:main", "show and check the accelerators of this machine"),
    "rollout": ("rollout.main:main", "generate responses and score them, without training"),
    "inspect": ("train.inspecting:main", "say what would be built from a model directory, and how it can be divided"),
    "export": ("train.exporting:main", "write a checkpoint's model as a Hugging Face directory"),
    "report": ("observability.__main__:report", "write a run's report.html anew from what lies in its directory"),
}


def accelrl(argv: list[str] | None = None) -> int:
    """``accelrl train|accel|rollout|report ...``, the same as ``python -m train ...``; returns the exit status."""
    return run_guarded(lambda: _accelrl(sys.argv[1:] if argv is None else argv))


def _accelrl(arguments: list[str]) -> int:
    from train.safe_path import secure_sys_path

    secure_sys_path()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text(), file=sys.stdout if arguments else sys.stderr, end="")
        return 0 if arguments else 2
    return _dispatch(arguments[0], arguments[1:])


def run_guarded(command: Callable[[], int]) -> int:
    """The exit status of ``command``. Its own errors are printed in one message: 2 for something given that cannot be
    used, 1 for a run that cannot go on. An interrupt gives 130; any other error keeps its traceback.
    """
    open_standard_streams()
    try:
        return command()
    except KeyboardInterrupt as interrupt:
        print(f"accelrl: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError) as error:
        status = _status_of(error)
        if status is None:
            raise
        print(f"accelrl: error: {error}", file=sys.stderr)
        return status
    except OSError as error:
        from train.checkpoint.errors import DISK_ERRORS

        if error.errno not in DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(
            f"accelrl: error: {where}{error.strerror}; make room, or give directories on another disk, and start the "
            "run again (--load goes on from its newest checkpoint)",
            file=sys.stderr,
        )
        return 1


def _status_of(error: Exception) -> int | None:
    """The exit status of one of our own errors. Imports stand here so that accelrl() comes before any of ours."""
    from samples.errors import InputError, RunError

    if isinstance(error, InputError):
        return 2
    if isinstance(error, RunError):
        return 1
    if not isinstance(error, RuntimeError):
        return None
    from accel.errors import AcceleratorError  # only here: accel may load torch

    return 2 if isinstance(error, AcceleratorError) else None


def open_standard_streams() -> None:
    """Put the null device where standard input, output or errors are closed (``>&-``).

    Otherwise the next file opened, a checkpoint say, would get that number and what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _dispatch(name: str, argv: list[str]) -> int:
    from samples.errors import InputError

    if name not in COMMANDS:
        from train.config.names import nearest

        meant = nearest(name, COMMANDS)
        hint = f"did you mean accelrl {meant}?" if meant else f"the commands are {', '.join(COMMANDS)}"
        if name.startswith("-"):
            hint = f"flags come after the command: accelrl train {name} ..."
        raise InputError(f"{name}: unknown command; {hint}")
    module, _, function = COMMANDS[name][0].partition(":")
    status: int = getattr(importlib.import_module(module), function)(argv)
    return status


def _help_text() -> str:
    lines = [f"  {name:8} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: accelrl COMMAND [--flag VALUE ...]", "", *lines, "", "accelrl COMMAND --help says more.", ""]
    )
