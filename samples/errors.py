"""The error for anything a person gave us that cannot be used."""


class InputError(ValueError):
    """A flag, a file or a function given by the user cannot be used.

    The message names the flag or the file and line, the value seen, and what to do. Command lines print it as it is
    and exit with status 2, without a traceback.
    """
