"""Rows mapped to token rows with numbers beside them, which are summed into a report and taken off again."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, Features, IterableDataset

from trl.data.counting import PreparationReport
from trl.data.formats import column_names
from trl.data.preparation import STREAM_BATCH, log_warnings

Numbers = Mapping[str, np.ndarray]
RowsFunction = Callable[[dict[str, list], Sequence[int]], dict[str, list]]
SHOWN_ROWS = 3


@dataclass
class RowReport(PreparationReport):
    """Counts of one data set of completions; `first` has the first rows behind a count (of pairs taken apart: the pairs)."""

    equal_rows: int = 0
    promptless_rows: int = 0
    empty_completions: int = 0
    first: dict[str, list[int]] = field(default_factory=dict)

    def add(self, counts: PreparationReport) -> None:
        super().add(counts)
        for name, rows in counts.first.items() if isinstance(counts, RowReport) else ():
            self.first[name] = [*self.first.get(name, []), *rows][:SHOWN_ROWS]

    def take(self, numbers: Numbers, *, left_out: np.ndarray, flags: Sequence[str]) -> None:
        """Add the numbers of rows, of which those `left_out` are not trained on; `flags` are columns that mark rows."""
        lost = int(left_out.sum())
        counted = type(self)(
            self.dataset_name,
            rows=len(left_out),
            tokens=int(numbers["tokens"][~left_out].sum()),
            truncated_rows=int((numbers["removed_tokens"] > 0).sum()),
            removed_tokens=int(numbers["removed_tokens"].sum()),
            untrained_rows=lost,
            dropped_rows=lost,
        )
        for name in ("shifted_rows", "removed_begin_tokens", *flags):
            setattr(counted, name, int(numbers[name].sum()))
        marked = {"untrained_rows": left_out, **{name: numbers[name] > 0 for name in flags}}
        counted.first = {
            name: numbers["row"][rows][:SHOWN_ROWS].tolist() for name, rows in marked.items() if rows.any()
        }
        self.add(counted)


class Counting(Protocol):
    """What becomes of the numbers of rows."""

    @property
    def report(self) -> PreparationReport: ...

    def tally(self, numbers: Numbers, *, first_row: int, is_whole: bool) -> np.ndarray:
        """Add the numbers of rows to the report; the positions of those to keep.

        Raises: ValueError for rows that the policy refuses, and where of a whole data set nothing can be trained.
        """
        ...


def map_rows(
    dataset: Any,
    function: RowsFunction,
    *,
    features: Mapping[str, Any],
    desc: str,
    num_proc: int | None = None,
    keep_columns: Sequence[str] = (),
    batch_size: int | None = None,
) -> Any:
    """`function(batch, indices)` over a data set of either kind; given columns go, but for those to keep."""
    columns = column_names(dataset)
    kept = [column for column in keep_columns if column in columns and column not in features]
    known = {} if dataset.features is None else {column: dataset.features[column] for column in kept}
    made = {**known, **features} if len(known) == len(kept) else None
    is_stored = isinstance(dataset, Dataset)
    size = batch_size or (1000 if is_stored else STREAM_BATCH)
    return dataset.map(
        function,
        batched=True,
        with_indices=True,
        batch_size=size,
        remove_columns=[column for column in columns if column not in kept],
        features=None if made is None else Features(made),
        **({"num_proc": num_proc, "desc": desc} if is_stored else {}),
    )


def count_rows_by(dataset: Any, counting: Counting, columns: Sequence[str]) -> Any:
    """The data set without its columns of numbers, and without the rows that `counting` does not keep.

    A stored data set is counted here; of a stream the first rows are looked at here, and all are counted as they pass.
    """
    if isinstance(dataset, Dataset):
        table: Any = dataset.with_format("numpy").select_columns(list(columns))[:]
        kept = counting.tally(table, first_row=0, is_whole=True)
        log_warnings(counting.report)
        rows = dataset.remove_columns(list(columns))
        return rows if len(kept) == len(dataset) else rows.select(kept)
    _look_at_first(dataset, counting, columns)
    features = dataset.features
    if features is not None:
        features = Features({name: kind for name, kind in features.items() if name not in columns})
    return dataset.map(
        PassingCounts(counting, tuple(columns)),
        batched=True,
        batch_size=STREAM_BATCH,
        with_indices=True,
        remove_columns=list(columns),
        features=features,
    )


def _look_at_first(dataset: IterableDataset, counting: Counting, columns: Sequence[str]) -> None:
    rows = list(dataset.take(STREAM_BATCH))
    numbers = {column: np.asarray([row[column] for row in rows]) for column in columns}
    copy.deepcopy(counting).tally(numbers, first_row=0, is_whole=True)


@dataclass
class PassingCounts:
    """Counts the rows of a stream as they pass, and leaves out those that are not kept."""

    counting: Counting
    columns: tuple[str, ...]

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        numbers = {column: np.asarray(batch[column]) for column in self.columns}
        kept = self.counting.tally(numbers, first_row=indices[0], is_whole=False)
        log_warnings(self.counting.report)
        return {name: [values[row] for row in kept] for name, values in batch.items() if name not in self.columns}  # fmt: skip
