"""Rows with numbers beside them: the same rows and sums from stored data sets and streams."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, IterableDataset, List, Value

from trl.data.counting import PreparationReport
from trl.data.row_counters import Numbers, count_rows_by, map_rows

FEATURES = {"ids": List(Value("int32")), "size": Value("int32"), "place": Value("int32")}


@dataclass
class EvenSizes:
    """Keeps rows of even size; sums sizes into `tokens`."""

    report: PreparationReport

    def tally(self, numbers: Numbers, *, first_row: int, is_whole: bool) -> np.ndarray:
        assert numbers["place"][0] == first_row
        if is_whole and not len(numbers["size"]):
            raise ValueError("no rows")
        self.report.add(
            PreparationReport(rows=len(numbers["size"]), tokens=int(numbers["size"].sum()), untrained_rows=1)
        )
        return np.flatnonzero(numbers["size"] % 2 == 0)


def measured(batch: dict[str, list], indices: Any) -> dict[str, list]:
    sizes = [len(text) for text in batch["text"]]
    return {"ids": [[size] * size for size in sizes], "size": sizes, "place": list(indices)}


def run(dataset: Any, **options: Any) -> tuple[Any, PreparationReport]:
    report = PreparationReport()
    mapped = map_rows(dataset, measured, features=FEATURES, desc="Measuring", **options)
    return count_rows_by(mapped, EvenSizes(report), ("size", "place")), report


ROWS = [{"text": "a" * (number % 7), "weight": number / 2} for number in range(200)]


@pytest.mark.parametrize("keep", [(), ("weight",), ("weight", "absent")])
def test_stored_and_streamed_rows_and_sums(keep: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    stored, counted = run(Dataset.from_list(ROWS), keep_columns=keep)
    expected = [row for row in ROWS if len(row["text"]) % 2 == 0]
    assert stored["ids"][:] == [[len(row["text"])] * len(row["text"]) for row in expected]
    assert stored.column_names == [*keep[:1], "ids"]
    assert (counted.rows, counted.tokens) == (200, sum(len(row["text"]) for row in ROWS))
    for stream in (
        Dataset.from_list(ROWS).to_iterable_dataset(),
        IterableDataset.from_generator(lambda: iter(ROWS)),
    ):
        caplog.clear()
        passed, passing = run(stream, keep_columns=keep)
        assert passing.rows == 0  # looking at the first rows counts none
        assert list(passed) == list(stored)
        assert (passing.rows, passing.tokens) == (counted.rows, counted.tokens)
        assert caplog.text.count("rows have no trained token left") == 1
