"""Streams (iterable data sets) as training needs them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from trl.data.formats import Row


def is_streaming(dataset: object) -> bool:
    """Whether rows can only be read in order."""
    return isinstance(dataset, IterableDataset) or (dataset is not None and not hasattr(dataset, "__len__"))


class RepeatedStream(IterableDataset):
    """A stream that starts again at its end, with the next epoch's shuffling. Raises: ValueError if it has no row."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Row]:
        epoch, worker = 0, get_worker_info()
        if worker is not None and hasattr(self.stream, "_epoch"):
            # datasets' own streams: workers share the epoch's memory, but each counts its own
            self.stream._epoch = int(self.stream._epoch)
        while True:
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            rows = 0
            for row in self.stream:
                rows += 1
                yield row
            if not rows and worker is not None and worker.id > 0:
                return  # a stream of fewer shards than workers leaves this one without rows
            if not rows:
                raise ValueError("the training stream has no row. Check its filters and its split.")
            epoch += 1


class StreamRounds(IterableDataset):
    """The rows of a stream for one of several processes: a batch of each round, of which the last is not filled.

    A process without rows in the last round repeats that round's first one. Once the stream was read to its end in this
    process, `count` is its number of rows, and `missing` that of the processes without rows in the last round.
    """

    def __init__(self, stream: Iterable, rows: int, *, process: int = 0, processes: int = 1) -> None:
        self.stream, self.rows, self.process, self.processes = stream, rows, process, processes
        self.count = self.missing = 0

    def __iter__(self) -> Iterator[Row]:
        self.count, stream = 0, iter(self.stream)
        while round := list(islice(stream, self.rows * self.processes)):
            self.count += len(round)
            self.missing = self.processes - -(-len(round) // self.rows)
            yield from round[self.rows * self.process :][: self.rows] or round[:1]


ReadRows = Callable[[dict[str, list], list[int]], dict[str, list]]
"""(columns of some rows, their positions) -> columns made of them."""


class RowStream:
    """Rows of a stream by position, and the columns that `read` makes of them; the stream repeats at its end.

    A position has the same row in every process and after every restart, if the stream is deterministic. Positions are
    read in ascending order; a smaller one reads from the beginning. `columns` are read, `column_names` result.

    >>> from datasets import Dataset
    >>> stream = Dataset.from_dict({"prompt": ["a", "b", "c"]}).to_iterable_dataset()
    >>> def read(batch, _):
    ...     return {"length": [len(text) for text in batch["prompt"]]}
    >>> RowStream(stream, ["prompt"], ["prompt", "length"], read)[[1, 1, 3]]
    {'prompt': ['b', 'b', 'a'], 'length': [1, 1, 1]}
    """

    def __init__(self, stream: Iterable, columns: Sequence[str], column_names: Sequence[str], read: ReadRows) -> None:
        self._stream, self._columns, self._read = RepeatedStream(stream), list(columns), read
        self.column_names = list(column_names)
        self._rows: Iterator[Row] = iter(self._stream)
        self._next = 0  # the position of the row that comes next

    def __getitem__(self, positions: Sequence[int]) -> dict[str, list]:
        wanted = sorted(set(positions))
        if wanted[0] < self._next:
            self._rows, self._next = iter(self._stream), 0
        rows = [self._row(position) for position in wanted]
        batch = {name: [row.get(name) for row in rows] for name in self._columns}
        columns = {**batch, **self._read(batch, wanted)}
        places = {position: place for place, position in enumerate(wanted)}
        return {name: [columns[name][places[position]] for position in positions] for name in self.column_names}

    def _row(self, position: int) -> Row:
        while self._next < position:
            next(self._rows)
            self._next += 1
        self._next += 1
        return next(self._rows)
