"""The errors that a command ends on with one message and no traceback."""


class InputError(ValueError):
    """A flag, a file or a function given by the user cannot be used.

    The message names the flag or the file and line, the value seen, and what to do. Command lines print it as it is
    and exit with status 2, without a traceback.
    """


class RunError(RuntimeError):
    """A run cannot go on, and the message says why and what to do.

    Command lines print it as it is and exit with status 1, without a traceback.
    """


def raised_at(error: BaseException) -> str:
    """`` (at FILE line N)``, the place in the code that raised ``error``; for functions of the user's, whose traceback
    does not get through to the message's reader."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" (at {trace.tb_frame.f_code.co_filename} line {trace.tb_lineno})"
