"""What every training and every test would pay for and no test is about."""

import gc
from functools import cache
from types import SimpleNamespace

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
