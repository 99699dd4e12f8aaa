"""Random streams of processes that draw from one seed."""

from __future__ import annotations

from torch import distributed

_STREAMS = 2**32  # of one process


def first_stream() -> int:
    """Where this process's random streams begin: those that share a seed would else draw the same for the same query."""
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() * _STREAMS if ready else 0
