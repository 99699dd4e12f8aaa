"""Ports for servers and process groups of tests."""

import socket
from random import SystemRandom


def free_port() -> int:
    """A free port of this machine, below those that connections get: none of them takes it before the test does."""
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
