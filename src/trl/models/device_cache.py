"""Giving unused accelerator memory back between the phases of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def empty_cache() -> None:
    """Collect garbage and release the cached memory of the accelerator there is; nothing on a CPU."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class PPODecorators:
    """Known place of a switch and a decorator: `optimize_device_cache` decides whether the block's memory is released."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        """A block, or by `@PPODecorators.empty_device_cache()` a function, after which the device's cache is emptied."""
        try:
            yield
        finally:
            if cls.optimize_device_cache:
                empty_cache()
