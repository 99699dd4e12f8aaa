"""Prompts out of a stream by their place in it, so that a rollout batch has the same ones in every process and after every restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import IterableDataset

from trl.data.streams import RepeatedStream

ReadPrompts = Callable[[dict[str, list], list[int]], dict[str, list]]
"""(columns of some rows, their positions) -> columns made of them."""


class PromptStream:
    """Rows of a stream by position, with what `read` makes of them; positions go on where the stream begins again.

    Positions are asked for in ascending order. Rows that nobody asks for are passed over unread, and a smaller position reads
    the stream from its beginning: what a position holds follows from the stream alone, which must give the same rows in the
    same order each time. `columns` are read of each row; `column_names` are those that are handed on, with what was made.

    >>> from datasets import Dataset
    >>> stream = Dataset.from_dict({"prompt": ["a", "b", "c"]}).to_iterable_dataset()
    >>> def read(batch, _):
    ...     return {"length": [len(text) for text in batch["prompt"]]}
    >>> PromptStream(stream, ["prompt"], ["prompt", "length"], read)[[1, 1, 3]]
    {'prompt': ['b', 'b', 'a'], 'length': [1, 1, 1]}
    """

    def __init__(
        self, stream: IterableDataset, columns: Sequence[str], column_names: Sequence[str], read: ReadPrompts
    ) -> None:
        self._stream, self._columns, self._read = RepeatedStream(stream), list(columns), read
        self.column_names = list(column_names)
        self._rows: Iterator[Mapping[str, Any]] = iter(self._stream)
        self._next = 0  # the position of the row that comes next

    def __getitem__(self, positions: Sequence[int]) -> dict[str, list]:
        wanted = sorted(set(positions))
        if wanted[0] < self._next:
            self._rows, self._next = iter(self._stream), 0
        rows = [self._row(position) for position in wanted]
        batch = {name: [row.get(name) for row in rows] for name in self._columns}
        columns = {**batch, **self._read(batch, wanted)}
        places = {position: place for place, position in enumerate(wanted)}
        return {
            name: [columns[name][places[position]] for position in positions] for name in self.column_names
        }

    def _row(self, position: int) -> Mapping[str, Any]:
        while self._next < position:
            next(self._rows)
            self._next += 1
        self._next += 1
        return next(self._rows)
