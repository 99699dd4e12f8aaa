"""What every training and every test would pay for and no test is about."""

import asyncio
import gc
import socket
import sys
import time
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch


def spare() -> None:
    """After imports: leave their objects out of garbage collections, and replace what takes most of a tiny training."""
    from accelerate.utils import memory, other
    from datasets import arrow_dataset, fingerprint

    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 10)
    # Each training begins with a full collection.
    memory.gc = SimpleNamespace(collect=lambda: gc.collect(1))
    # It reads the package's metadata each time.
    other.is_deepspeed_available = cache(other.is_deepspeed_available)
    # Hashes of all rows, and of what is made of them, name files of the cache; rows in memory have none.
    drawn: set[str] = set()
    update = fingerprint.update_fingerprint

    def draw(*_: object) -> str:
        drawn.add(name := fingerprint.generate_random_fingerprint())
        return name

    arrow_dataset.generate_fingerprint = draw
    fingerprint.update_fingerprint = arrow_dataset.update_fingerprint = lambda name, *of: (
        draw() if name in drawn else update(name, *of)
    )
    # `torch.manual_seed` keeps the seed of a device that is not there, with the whole formatted stack.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.device_count():
            device.manual_seed_all = lambda seed: None
    spare_waits()


def spare_waits() -> None:
    """Seconds until a store without a listener is tried again, a server sees that it should end, or workers are given up."""
    from torch.utils.data import _utils

    from trl.generation.serving import weight_channel

    # Workers of a loader that is freed together with its trainer are not told to end: 5 s for each of them.
    _utils.MP_STATUS_CHECK_INTERVAL = 0.5
    connect = weight_channel.TCPStore

    def store(host: str, port: int, *, is_master: bool, **options: Any) -> Any:
        until = time.monotonic() + options["timeout"].total_seconds()
        while not is_master and time.monotonic() < until:
            with suppress(OSError):
                socket.create_connection((host, port), timeout=1).close()
                break
            time.sleep(0.005)
        return connect(host, port, is_master=is_master, **options)

    weight_channel.TCPStore = store
    if server := sys.modules.get("uvicorn.server"):
        server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda s: asyncio.sleep(s / 20)})
