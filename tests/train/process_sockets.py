"""Which processes belong to a run, and on which addresses they wait for connections. Linux only (/proc)."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # TCP_LISTEN; a UDP socket without a peer


@dataclass(frozen=True)
class ListeningSocket:
    protocol: str
    address: str
    port: int
    process: str  # its name

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def run_processes(root: int, marker: str) -> set[int]:
    """Processes of the run that began with process ``root``, the leader of its session.

    They descend from it, are in its session, or have ``marker`` in their environment: a daemon that left both has that.
    """
    found = {root}
    parents = dict(_stat_fields())
    for pid, (_, session) in parents.items():
        if session == root or marker.encode() in _read(pid, "environ"):
            found.add(pid)
    while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return found & parents.keys()


def listening_sockets(pids: set[int]) -> set[ListeningSocket]:
    """Where these processes wait for connections (TCP) or for datagrams of anybody (UDP)."""
    waiting = dict(_waiting_sockets())
    found = set()
    for pid in pids:
        for inode in _socket_inodes(pid):
            if inode in waiting:
                found.add(ListeningSocket(*waiting[inode], process=_read(pid, "comm").decode().strip()))
    return found


def _waiting_sockets() -> Iterator[tuple[str, tuple[str, str, int]]]:
    """(inode, (protocol, address, port))."""
    for protocol, state in _WAITING.items():
        table = Path("/proc/net") / protocol
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in map(str.split, lines):
            if fields[3] == state:
                address, port = fields[1].split(":")
                yield fields[9], (protocol, _decode_address(address), int(port, 16))


def _decode_address(text: str) -> str:
    """The kernel writes an address as 32-bit words in the machine's byte order, each in hexadecimal."""
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _socket_inodes(pid: int) -> Iterator[str]:
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return  # it has ended
    for descriptor in descriptors:
        try:
            match = _SOCKET.fullmatch(os.readlink(descriptor.path))
        except OSError:
            continue
        if match:
            yield match[1]


def _stat_fields() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, session)) of every process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _read(int(entry), "stat").rpartition(b")")[2].split()
            if fields:
                yield int(entry), (int(fields[1]), int(fields[3]))


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
