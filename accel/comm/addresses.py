"""Which of this machine's addresses other machines reach it at, and which network interface that belongs to."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.contract import Accelerator
from accel.errors import AcceleratorError

HOST_IFNAME_ENV = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACES = ("lo", "lo0")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))  # reserved for documentation


def own_address() -> str:
    """The address from which this machine's packets to others leave. No packet is sent.

    A host name is not asked: it often stands for 127.0.1.1 in /etc/hosts. AcceleratorError without a network.
    """
    for elsewhere, family in _ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((elsewhere, 9))
            except OSError:
                continue
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    for name in _interfaces().values():
        if not ipaddress.ip_address(name).is_loopback:
            return name
    raise AcceleratorError("this machine has no address that others could reach: it has a loopback interface only")


def interface_of(address: str) -> str:
    """The name of the interface with this IPv4 or IPv6 address. AcceleratorError where none has it."""
    wanted = ipaddress.ip_address(address.strip("[]"))
    for name, found in _interfaces().items():
        if ipaddress.ip_address(found) == wanted:
            return name.partition(" ")[0]
    raise AcceleratorError(
        f"{address} is no address of this machine's interfaces ({', '.join(_interfaces().values())}): give Ray the "
        f"node's own address (ray start --node-ip-address), or name the interface in {HOST_IFNAME_ENV}"
    )


@contextmanager
def listening_on(accelerator: Accelerator, address: str) -> Iterator[None]:
    """Groups made meanwhile use the interface of ``address``, unless the environment names one that is no loopback.

    Groups of this machine alone, made before or after it, stay where they are.
    """
    variables = [name for name in (HOST_IFNAME_ENV, accelerator.socket_ifname_env) if name]
    before = {name: os.environ.get(name) for name in variables}
    to_set = [name for name, value in before.items() if value in (None, *LOOPBACK_INTERFACES)]
    os.environ.update(dict.fromkeys(to_set, interface_of(address) if to_set else ""))
    try:
        yield
    finally:
        # The host's collectives connect when they are made; an accelerator's may do so later.
        if HOST_IFNAME_ENV in to_set:
            del os.environ[HOST_IFNAME_ENV]
            if before[HOST_IFNAME_ENV] is not None:
                os.environ[HOST_IFNAME_ENV] = str(before[HOST_IFNAME_ENV])


def listening_socket(address: str) -> socket.socket:
    """A socket that listens on ``address`` alone, at a port that the kernel chose and that is held from now on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.bind((address, 0))
        made.listen(128)
    except OSError as error:
        made.close()
        raise AcceleratorError(f"no port of {address} can be listened on: {error.strerror}") from error
    return made


def _interfaces() -> dict[str, str]:
    """Addresses by interface; a further one of an interface has a number after a space."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    table = Path("/proc/net/if_inet6")
    for number, line in enumerate(table.read_text().splitlines() if table.exists() else ()):
        digits, *_, name = line.split()
        found[f"{name} {number}"] = str(ipaddress.IPv6Address(int(digits, 16)))
    return found
