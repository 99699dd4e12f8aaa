"""What preparing a data set did to its rows, in numbers: computed on whole columns, kept as the rows pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset

from trl.data.ragged import Ragged, is_number_list, read_ragged
from trl.data.tokenization import COUNTED

UntrainedPolicy = Literal["report", "error", "drop"]
MASKS = ("completion_mask", "assistant_masks", "labels")
BLOCK_ROWS = 50_000


@dataclass
class PreparationReport:
    """Counts of one data set's preparation; of a streaming one, of the rows that this process has seen so far."""

    dataset_name: str = "train"
    rows: int = 0
    tokens: int = 0
    truncated_rows: int = 0
    removed_tokens: int = 0
    untrained_rows: int = 0
    dropped_rows: int = 0
    unstopped_rows: int = 0
    shifted_rows: int = 0
    removed_begin_tokens: int = 0
    is_streaming: bool = False
    warned: list[str] = field(default_factory=list)  # counts that a warning was already given for

    def add(self, counts: "PreparationReport") -> None:
        """Add the counts of further rows."""
        for count in fields(self):
            if count.type is int:
                setattr(self, count.name, getattr(self, count.name) + getattr(counts, count.name))

    def summary(self) -> str:
        """One line for people: rows, tokens, and every count that is not zero."""
        parts = [f"{self.rows} rows", f"{self.tokens} tokens"]
        parts += [text.format(self) for name, text in self.phrases().items() if getattr(self, name)]
        seen = " (streaming, so far)" if self.is_streaming else ""
        return f"{self.dataset_name} dataset{seen}: {', '.join(parts)}"

    def new_warnings(self) -> list[str]:
        """One sentence for each count that a person should look into, given once."""
        texts = self.warnings()
        due = [name for name in texts if getattr(self, name) and name not in self.warned]
        self.warned += due
        return [f"{self.dataset_name} dataset: {texts[name].format(self)}" for name in due]

    def phrases(self) -> Mapping[str, str]:
        """How the summary speaks of each count."""
        return _PHRASES

    def warnings(self) -> Mapping[str, str]:
        """The counts that call for a warning, and its words."""
        return _WARNINGS


_PHRASES = {
    "truncated_rows": "{0.truncated_rows} truncated ({0.removed_tokens} tokens removed)",
    "untrained_rows": "{0.untrained_rows} with nothing trained",
    "dropped_rows": "{0.dropped_rows} of these dropped",
    "unstopped_rows": "{0.unstopped_rows} without a trained stop token",
    "shifted_rows": "{0.shifted_rows} with a boundary inside a token",
    "removed_begin_tokens": "{0.removed_begin_tokens} doubled begin tokens removed",
}
_WARNINGS = {
    "untrained_rows": (
        "{0.untrained_rows} of {0.rows} rows have no trained token left and {0.dropped_rows} of them were dropped. "
        "Raise max_length, shorten the prompts, or filter these rows."
    ),
    "unstopped_rows": (
        "{0.unstopped_rows} of {0.rows} rows have a turn whose text ends without a stop token, so the model does not "
        "learn to stop there. Put the token inside the template's generation marks, or add one to the template."
    ),
    "shifted_rows": (
        "in {0.shifted_rows} of {0.rows} rows a token reaches over the end of the prompt, or of a turn; it is "
        "trained. Let prompts end before a space, not after it."
    ),
    "removed_begin_tokens": (
        "{0.removed_begin_tokens} begin tokens were written by both text and tokenizer; one of each two was removed."
    ),
}


class RowCounts(NamedTuple):
    """For each row: its tokens, those that truncation keeps, and those of them that are trained."""

    lengths: np.ndarray
    kept: np.ndarray
    trained: np.ndarray


def count_rows(
    columns: Mapping[str, Ragged], *, max_length: int | None, name: str, first_row: int = 0
) -> RowCounts:
    """Lengths before and after truncation to `max_length` tokens, and trained tokens after it.

    A token is trained where all masks are 1 (and `labels` is not -100); the first token of a row is predicted from
    nothing and does not count.

    Raises: ValueError naming the row whose mask has another length than its `input_ids`.
    """
    ids = columns["input_ids"]
    for column in MASKS:
        if column in columns:
            _check_lengths(ids.lengths, columns[column].lengths, column, name, first_row)
    trained = np.ones(len(ids.values), dtype=bool)
    for column in MASKS:
        if column in columns:
            values = columns[column].values
            trained &= (values != -100) if column == "labels" else (values == 1)
    lengths = ids.lengths
    kept = lengths if max_length is None else np.minimum(lengths, max_length)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained, dtype=np.int64)])
    starts = ids.offsets[:-1]
    return RowCounts(lengths, kept, sums[starts + kept] - sums[starts + np.minimum(kept, 1)])


def _check_lengths(expected: np.ndarray, given: np.ndarray, column: str, name: str, first_row: int) -> None:
    wrong = np.flatnonzero(expected != given)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{name} dataset, row {first_row + row}, column {column!r}: {given[row]} values for {expected[row]} tokens in "
            "'input_ids', expected as many. Give one value for each token."
        )


def report_of(counts: RowCounts, flags: Mapping[str, np.ndarray], *, name: str) -> PreparationReport:
    """The counts of rows summed up; `flags` are the columns in `COUNTED` where the tokenizer made them."""
    removed = counts.lengths - counts.kept
    nothing = np.zeros(1, np.int64)
    return PreparationReport(
        dataset_name=name,
        rows=len(counts.lengths),
        tokens=int(counts.kept.sum()),
        truncated_rows=int((removed > 0).sum()),
        removed_tokens=int(removed.sum()),
        untrained_rows=int((counts.trained == 0).sum()),
        unstopped_rows=int((flags.get("unstopped_turns", nothing) > 0).sum()),
        shifted_rows=int((flags.get("shifted_boundaries", nothing) > 0).sum()),
        removed_begin_tokens=int(flags.get("removed_begin_tokens", nothing).sum()),
    )


def apply_policy(
    counts: RowCounts, report: PreparationReport, policy: UntrainedPolicy, *, first_row: int = 0
) -> np.ndarray:
    """Positions of the rows to keep; under "drop" the report forgets the dropped rows' tokens and counts the rows.

    Raises: ValueError under "error" where a row has no trained token.
    """
    untrained = counts.trained == 0
    if policy == "error" and untrained.any():
        raise ValueError(
            untrained_message(counts, int(np.flatnonzero(untrained)[0]), report.dataset_name, first_row)
        )
    if policy != "drop":
        return np.arange(len(untrained))
    report.dropped_rows = int(untrained.sum())
    report.tokens -= int(counts.kept[untrained].sum())
    return np.flatnonzero(~untrained)


def untrained_message(counts: RowCounts, row: int, name: str, first_row: int = 0) -> str:
    """What to say of a row without a trained token."""
    length, kept = int(counts.lengths[row]), int(counts.kept[row])
    cut = f" ({kept} after truncation to max_length)" if kept < length else ""
    remedy = (
        "Raise max_length, shorten the prompt, or filter the row out."
        if kept < length
        else "Check the masks, the chat template's generation marks, or filter the row out."
    )
    return (
        f"{name} dataset, row {first_row + row}, column 'input_ids': none of the row's {length} tokens{cut} is trained, "
        f"expected at least one. {remedy}"
    )


def count_stored(
    dataset: Dataset, *, max_length: int | None, name: str
) -> tuple[RowCounts, dict[str, np.ndarray]]:
    """`count_rows` over a stored data set, a block of rows at a time, and its columns of `COUNTED`."""
    blocks, flags = [], {column: [] for column in COUNTED if column in dataset.column_names}
    for table in dataset.with_format("arrow").iter(batch_size=BLOCK_ROWS):
        first_row = sum(len(block.lengths) for block in blocks)
        columns = {
            column: _read_tokens(table, column, name)
            for column in ("input_ids", *MASKS)
            if column in table.column_names  # type: ignore[union-attr]
        }
        blocks.append(count_rows(columns, max_length=max_length, name=name, first_row=first_row))
        for column, parts in flags.items():
            parts.append(table[column].to_numpy())  # type: ignore[union-attr]
    joined = RowCounts(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
    return joined, {column: np.concatenate(parts) for column, parts in flags.items()}


def _read_tokens(table: Any, column: str, name: str) -> Ragged:
    chunks = table[column]
    kind: pa.DataType = chunks.type
    if not is_number_list(kind) or not pa.types.is_integer(kind.value_type):  # type: ignore[attr-defined]
        raise TypeError(
            f"{name} dataset, row 0, column {column!r}: values of type {kind}, expected lists of integers. Tokenize the "
            "text, or rename the column."
        )
    return read_ragged(chunks, column)


def ragged_of(rows: list[list[int]]) -> Ragged:
    """Lists as one flat array and offsets.

    >>> ragged_of([[1, 2], [], [3]]).offsets.tolist()
    [0, 2, 2, 3]
    """
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
    values = (
        np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if rows else np.empty(0, np.int64)
    )
    return Ragged(values, offsets)
