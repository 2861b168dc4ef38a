"""The console script ``accelrl``, and how every command of ours ends on an error."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable

COMMANDS = {  # module with main(argv) -> exit status; imported only when asked for
    "train": ("train.main", "train a model; with no flags, a small built-in example"),
    "accel": ("accel.__main__", "show and check the accelerators of this machine"),
    "rollout": ("rollout.main", "generate responses and score them, without training"),
}


def accelrl(argv: list[str] | None = None) -> int:
    """``accelrl train|accel|rollout ...``, the same as ``python -m train ...``; returns the exit status."""
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
    module = COMMANDS[name][0]
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{name}: this version has no such command yet; accelrl --help lists those that it has")
    status: int = importlib.import_module(module).main(argv)
    return status


def _help_text() -> str:
    there = {name: about for name, (module, about) in COMMANDS.items() if importlib.util.find_spec(module)}
    lines = [f"  {name:8} {about}" for name, about in there.items()]
    return "\n".join(
        ["usage: accelrl COMMAND [--flag VALUE ...]", "", *lines, "", "accelrl COMMAND --help says more.", ""]
    )
