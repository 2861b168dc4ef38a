"""Addresses of servers: host names, IPv4 and IPv6, with or without a port, as people and other programs write them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from samples.errors import InputError


def bracketed(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host.strip("[]")).version == 6 and host[:1] != "[" else host
    except ValueError:
        return host


def base_url(host: str, port: int) -> str:
    """``http://host:port``, without a slash at the end."""
    return f"http://{bracketed(host)}:{port}"


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """(host, port) of ``host:port``, ``[v6]:port`` or ``http://host:port``. InputError names the flag."""
    wrong = InputError(f"{flag} {text}: expected host:port, such as 10.0.0.5:30000 or [fd00::7]:30000")
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    plain = parts.scheme in ("", "http") and not (
        parts.path.strip("/") or parts.query or parts.fragment or parts.username
    )
    if not host or not port or not plain or any(letter.isspace() for letter in host):
        raise wrong
    return host, port
