"""Where processes that are to work together meet: the variables that `torch.distributed` reads."""

from __future__ import annotations

import os
import socket


def ensure_master_addr_port(addr: str | None = None, port: int | None = None) -> None:
    """Set `MASTER_ADDR` and `MASTER_PORT` for this process and those that it starts.

    What is given is set; else what the environment has stays; else they become `localhost` and a port that is free now.
    """
    os.environ["MASTER_ADDR"] = addr or os.environ.get("MASTER_ADDR", "localhost")
    os.environ["MASTER_PORT"] = str(port or os.environ.get("MASTER_PORT") or get_open_port())


def get_open_port() -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
