"""Streams (iterable data sets) as training needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read in order."""
    return isinstance(dataset, IterableDataset) or (dataset is not None and not hasattr(dataset, "__len__"))


class RepeatedStream(IterableDataset):
    """A stream that starts again when it ends, with the next epoch's shuffling; rows run on across the seam.

    So every optimiser step has all its rows, and skipping the first N rows reaches the same place in every run.

    Raises: ValueError where the stream has no row.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        epoch = 0
        if get_worker_info() is not None:
            _keep_epoch_to_itself(self.stream)
        while True:
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            rows = 0
            for row in self.stream:
                rows += 1
                yield row
            if not rows and _is_spare_worker():
                return
            if not rows:
                raise ValueError(
                    "the training stream has no row. Check the data set, its filters and its split."
                )
            epoch += 1


class CountedStream(IterableDataset):
    """A stream that knows, once it was read to its end in this process, how many rows it has: `count`."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for row in self.stream:
            self.count += 1
            yield row


def _keep_epoch_to_itself(stream: Any) -> None:
    """Take a stream's epoch out of the memory that a data loader's workers share: each counts its own, and by another's it would
    read other shards."""
    if hasattr(stream, "_epoch"):  # of datasets' own streams
        stream._epoch = int(stream._epoch)


def _is_spare_worker() -> bool:
    """Whether this is a data loader's worker beyond the first: a stream of fewer shards leaves it without rows."""
    worker = get_worker_info()
    return worker is not None and worker.id > 0
