"""The console script ``accelrl``, and how every command of ours ends on an error."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

COMMANDS = {  # "module:function", function(argv) -> exit status; imported only when asked for
    "train": ("train.main:main", "train a model; with no flags, a small built-in example"),
    "accel": ("accel.__main__:main", "show and check the accelerators of this machine"),
    "rollout": ("rollout.main:main", "generate responses and score them, without training"),
    "report": ("observability.__main__:report", "write a run's report.html anew from what lies in its directory"),
}


def accelrl(argv: list[str] | None = None) -> int:
    """``accelrl train|accel|rollout|report ...``, the same as ``python -m train ...``; returns the exit status."""
    from train.safe_path import secure_sys_path

    secure_sys_path()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text(), file=sys.stdout if arguments else sys.stderr, end="")
        return 0 if arguments else 2
    return run_guarded(lambda: _dispatch(arguments[0], arguments[1:]))


def run_guarded(command: Callable[[], int]) -> int:
    """The exit status of ``command``. Its own errors are printed in one message and give 2, an interrupt gives 130.

    An error that is not about what the user gave keeps its traceback.
    """
    from samples.errors import InputError  # in functions, so that accelrl() comes before any import of ours

    try:
        return command()
    except KeyboardInterrupt:
        print("accelrl: interrupted", file=sys.stderr)
        return 130
    except InputError as error:
        message = str(error)
    except RuntimeError as error:
        from accel.errors import AcceleratorError  # only here: accel may load torch

        if not isinstance(error, AcceleratorError):
            raise
        message = str(error)
    print(f"accelrl: error: {message}", file=sys.stderr)
    return 2


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
