"""Streams that start again."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from trl.data.streaming import RepeatedStream, StreamRounds


def stream_of(rows: int, *, shards: int):
    return Dataset.from_dict({"number": list(range(rows))}).to_iterable_dataset(num_shards=shards)


def passes(numbers: Iterator[int], *, rows: int, count: int) -> list[list[int]]:
    return [list(islice(numbers, rows)) for _ in range(count)]


def test_rows_run_on_across_the_seam():
    numbers = (row["number"] for row in RepeatedStream(stream_of(3, shards=1)))
    assert passes(numbers, rows=3, count=3) == [[0, 1, 2]] * 3


def test_a_stream_without_rows_is_an_error():
    with pytest.raises(ValueError, match="the training stream has no row"):
        next(iter(RepeatedStream(stream_of(3, shards=1).filter(lambda row: False))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_workers_passes_are_its_own(workers):
    """The epoch of a stream of `datasets` lies in memory that all workers share. One that set another's would leave it shards
    that its neighbour reads, too; here each works through eight passes of a stream of two shards."""
    stream = stream_of(4, shards=2)
    shared = stream._epoch
    assert isinstance(shared, torch.Tensor) and shared.is_shared()
    loader = DataLoader(RepeatedStream(stream), batch_size=2, num_workers=workers, collate_fn=list)
    batches = [[row["number"] for row in batch] for batch in islice(loader, 16)]
    together = [sorted(one + other) for one, other in zip(batches[::2], batches[1::2], strict=True)]
    assert together == [[0, 1, 2, 3]] * 8
    assert int(shared) == (0 if workers else 7)


def test_rounds_of_a_stream_are_counted_and_the_last_is_not_filled():
    for process, expected in enumerate(([0, 1, 6], [2, 3, 6], [4, 5, 6])):
        rounds = StreamRounds([{"number": n} for n in range(7)], 2, process=process, processes=3)
        for _ in range(2):
            assert [row["number"] for row in rounds] == expected  # those without rows repeat the round's first one
            assert (rounds.count, rounds.missing) == (7, 2)
    alone = StreamRounds(stream_of(5, shards=2), 2)
    assert len(list(alone)) == alone.count == 5
    assert alone.missing == 0
