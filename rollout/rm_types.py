"""The values of --rm-type and --rm-url, told apart without importing any reward."""

from __future__ import annotations

from difflib import get_close_matches
from urllib.parse import urlsplit

from samples.errors import InputError

RM_TYPES = ("exact_match", "math", "reasoning_gym", "remote_rm")


def check_rm_type(rm_type: str) -> tuple[str, str | None]:
    """The kind of reward and, for ``reasoning_gym:TASK``, its task. Raises InputError for any other value."""
    kind, colon, task = rm_type.partition(":")
    if kind in RM_TYPES and (not colon or (kind == "reasoning_gym" and task)):
        return kind, task or None
    near = get_close_matches(kind, RM_TYPES, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(
        f"--rm-type {rm_type!r} is not known{meant}: choose {', '.join(RM_TYPES)} (reasoning_gym:TASK names a task), "
        "or give a function with --custom-rm-path"
    )


def check_rm_url(url: str | None) -> str:
    """The address of the reward service. Raises InputError for none and for one that cannot be called."""
    if not url:
        raise InputError("--rm-type remote_rm needs the address of the service: --rm-url http://host:port/path")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is no number, an IPv6 address without its bracket
        usable = False
    if not usable:
        raise InputError(f"--rm-url {url!r} is not an address such as http://host:port/path")
    return url
