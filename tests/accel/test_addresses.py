"""Addresses of this machine that others reach, and interfaces by them."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from accel.backends.cpu import CpuAccelerator
from accel.comm import addresses
from accel.comm.addresses import HOST_IFNAME_ENV, interface_of, listening_on, listening_socket, own_address
from accel.errors import AcceleratorError


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") in addresses.LOOPBACK_INTERFACES
    if socket.has_ipv6 and "::1" in addresses._interfaces().values():
        assert interface_of("[::1]") in addresses.LOOPBACK_INTERFACES
    with pytest.raises(AcceleratorError, match=r"203\.0\.113\.7 is no address of this machine's interfaces \(127"):
        interface_of("203.0.113.7")


def test_the_own_address_is_one_that_others_can_reach(monkeypatch):
    """slime 2373: a host name may stand for 127.0.1.1; it is the route that counts."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    if all(ipaddress.ip_address(found).is_loopback for found in addresses._interfaces().values()):
        with pytest.raises(AcceleratorError, match="loopback interface only"):
            own_address()
    else:
        assert interface_of(own_address()) not in addresses.LOOPBACK_INTERFACES


def test_a_port_is_held_from_the_moment_it_is_known():
    """verl 6448: two that ask at the same time get different ports, and one address is listened on, not all."""
    with listening_socket("127.0.0.1") as first, listening_socket("127.0.0.1") as second:
        assert first.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]
        with socket.socket() as late, pytest.raises(OSError, match="in use"):
            late.bind(first.getsockname())
    with pytest.raises(AcceleratorError, match=r"no port of 203\.0\.113\.7"):
        listening_socket("203.0.113.7")


@pytest.mark.parametrize(("before", "within"), [(None, "lo"), ("lo", "lo"), ("eth7", "eth7")])
def test_groups_use_the_interface_of_the_address_while_they_are_made(monkeypatch, before, within):
    monkeypatch.delenv(HOST_IFNAME_ENV, raising=False)
    if before is not None:
        monkeypatch.setenv(HOST_IFNAME_ENV, before)
    with listening_on(CpuAccelerator(), "127.0.0.1"):
        assert os.environ[HOST_IFNAME_ENV] == within.replace("lo", interface_of("127.0.0.1"))
    assert os.environ.get(HOST_IFNAME_ENV) == before
