"""What the address of a server means to those who listen there and those who connect."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """The address to connect to for a server on `host`: the addresses that mean "all" mean this machine here."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family and the address that `host:port` stands for, of version 4 where it has one (`localhost` often has both).

    Raises: OSError for a name that nobody knows.
    """
    found = [(each[0], each[4]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return next((each for each in found if each[0] == socket.AF_INET), found[0])
