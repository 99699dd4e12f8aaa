"""Columns of lists of numbers: read and written as flat values and offsets, and cut to a length."""

from collections.abc import Container, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List

from trl.data.formats import DatasetType, Row, RowDict, StoredOrStream
from trl.options.checks import check_at_least

STREAM_BATCH = 64  # rows of a stream that are read at a time
MAX_CHUNK_VALUES = 2**30  # a list array counts its values in int32


class Ragged(NamedTuple):
    """Row i of a list column is `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_number_list(kind: pa.DataType) -> bool:
    """Whether an arrow type is a list of numbers or truth values, one for each token.

    >>> is_number_list(pa.list_(pa.int64())), is_number_list(pa.list_(pa.string())), is_number_list(pa.int64())
    (True, False, False)
    """
    if not is_list(kind):
        return False
    value = kind.value_type  # type: ignore[attr-defined]
    return pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)


def list_lengths(dataset: Dataset, *columns: str) -> np.ndarray:
    """The length of each row's lists in all columns, whatever format the rows are handed out in."""
    count = pc.list_value_length  # type: ignore[attr-defined]
    blocks = [sum(count(block[name]).to_numpy() for name in columns) for block in table_blocks(dataset)]
    return np.concatenate(blocks or [np.zeros(0, np.int64)])


def table_blocks(dataset: Dataset) -> Iterator[Any]:
    """The rows as arrow tables of at most 50,000."""
    return dataset.with_format("arrow").iter(batch_size=50_000)


def read_ragged(column: pa.ChunkedArray, name: str) -> Ragged:
    """Flat values and int64 offsets of a list column. Raises: ValueError where a row, or an item in it, is missing."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise ValueError(f"column {name!r}, row {row} ({column.null_count} rows): None, expected a list.")
    parts, lengths = [], [np.zeros(1, np.int64)]
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[attr-defined]
        values = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])  # type: ignore[attr-defined]
        if values.null_count:
            raise ValueError(f"column {name!r} has {values.null_count} items that are None. Filter them.")
        parts.append(values.to_numpy(zero_copy_only=False))
        lengths.append(np.diff(offsets))
    if not parts:
        parts = [np.empty(0, dtype=column.type.value_type.to_pandas_dtype())]
    return Ragged(parts[0] if len(parts) == 1 else np.concatenate(parts), np.concatenate(lengths).cumsum())


def write_ragged(ragged: Ragged, kind: pa.DataType) -> pa.ChunkedArray:
    """A list column of the given list type (a fixed size becomes a free one), in as many chunks as int32 needs."""
    value_type: pa.DataType = kind.value_type  # type: ignore[attr-defined]
    is_large = pa.types.is_large_list(kind)
    make, list_type = (pa.LargeListArray, pa.large_list) if is_large else (pa.ListArray, pa.list_)
    offset_type = np.int64 if is_large else np.int32
    chunks, first, rows = [], 0, len(ragged.offsets) - 1
    while first < rows or not chunks:
        limit = ragged.offsets[first] + MAX_CHUNK_VALUES
        last = min(max(first + 1, int(np.searchsorted(ragged.offsets, limit, side="right")) - 1), rows)
        offsets = ragged.offsets[first : last + 1]
        values = pa.array(ragged.values[offsets[0] : offsets[-1]], type=value_type)
        chunks.append(make.from_arrays(pa.array((offsets - offsets[0]).astype(offset_type)), values))
        first = last
    return pa.chunked_array(chunks, type=list_type(value_type))


def gather_rows(ragged: Ragged, rows: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """The first `lengths[k]` values of row `rows[k]`, one after another.

    >>> gather_rows(Ragged(np.arange(5), np.array([0, 2, 5])), [1, 0], [2, 1]).tolist()
    [2, 3, 0]
    """
    values, starts = ragged.values, ragged.offsets.tolist()
    pieces = [values[starts[row] : starts[row] + length] for row, length in zip(rows, lengths, strict=True)]
    return np.concatenate(pieces) if pieces else values[:0]


def cut_rows(ragged: Ragged, count: int, *, keep_end: bool = False) -> Ragged:
    """The first `count` values of each row, or with `keep_end` the last.

    >>> cut_rows(Ragged(np.arange(5), np.array([0, 2, 5])), 2, keep_end=True).values.tolist()
    [0, 1, 3, 4]
    """
    places, lengths = np.arange(ragged.offsets[0], ragged.offsets[-1]), ragged.lengths
    if keep_end:
        is_kept = places >= np.repeat(ragged.offsets[1:] - count, lengths)
    else:
        is_kept = places < np.repeat(ragged.offsets[:-1] + count, lengths)
    offsets = np.concatenate([np.zeros(1, np.int64), np.minimum(lengths, count).cumsum()])
    return Ragged(ragged.values[is_kept], offsets)


def restore_format(transformed: Any, original: Any) -> Any:
    """`transformed` in the format of `original`; a choice of columns is kept as far as they still exist."""
    if isinstance(original, IterableDataset):
        streamed = original._formatting  # datasets 5 has no public way to read it
        return transformed.with_format(streamed.format_type if streamed else None)
    kept = original.format
    columns = [name for name in kept["columns"] if name in transformed.column_names]
    everything = set(original.column_names) <= set(kept["columns"])
    return transformed.with_format(
        kept["type"],
        columns=None if everything else columns,
        output_all_columns=kept["output_all_columns"],
        **kept["format_kwargs"],
    )


def without_list_sizes(features: Features | None) -> Features | None:
    """The features with every fixed-size list made a free one, because cutting and packing change sizes.

    >>> from datasets import Value
    >>> without_list_sizes(Features({"ids": List(Value("int64"), length=3)}))
    {'ids': List(Value('int64'))}
    """
    if features is None:
        return None
    free = {name: List(kind.feature) if isinstance(kind, List) else kind for name, kind in features.items()}
    return Features(free)


def truncate_dataset(dataset: DatasetType, max_length: int, map_kwargs: RowDict | None = None) -> DatasetType:
    """Every row with the first `max_length` items of each token column, that is of each list of numbers.

    Other columns (text, messages, images, nested lists) stay as they are. Raises: ValueError for `max_length` < 1, for
    a packed row (with `seq_lengths`) that would have to be cut, and for a missing row (None) of a column that has to be
    cut, unless it is of a stream without features.

    >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "text": ["abc", "d"]})
    >>> truncate_dataset(rows, 2)[:]
    {'input_ids': [[1, 2], [4]], 'text': ['abc', 'd']}
    """
    check_at_least("max_length", max_length, minimum=1, optional=False)
    if isinstance(dataset, Mapping):
        parts = cast(Mapping[str, Dataset], dataset)
        cut = {name: truncate_dataset(part, max_length, map_kwargs) for name, part in parts.items()}
        return cast(Any, type(dataset))(cut)
    return cast(DatasetType, truncate_rows(dataset, max_length, map_kwargs))


def truncate_rows(
    dataset: StoredOrStream, max_length: int, map_kwargs: RowDict | None = None, *, keep_end: bool = False
) -> Any:
    """`truncate_dataset`, or with `keep_end` every row with the last items of each token column."""
    is_stored = isinstance(dataset, Dataset)
    if is_stored and not len(dataset):
        return dataset
    settings = {"max_length": max_length, "keep_end": keep_end}
    if not is_stored and dataset.features is None:  # a stream whose rows need not be alike
        return restore_format(dataset.with_format(None).map(_cut_row, fn_kwargs=settings), dataset)
    options: RowDict = dict(map_kwargs or {}) if is_stored else {"batch_size": STREAM_BATCH}
    options |= {"features": without_list_sizes(dataset.features), "fn_kwargs": settings}
    cut = dataset.with_format("arrow").map(truncate_table, batched=True, **options)
    return restore_format(cut, dataset)


def truncate_table(table: pa.Table, max_length: int, keep_end: bool = False) -> pa.Table:
    """`truncate_rows` on an arrow table; lists of a fixed size become free ones."""
    for index, field in enumerate(table.schema):
        if not is_number_list(field.type):
            continue
        longest = pc.max(pc.list_value_length(table[index])).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
        if longest > max_length:
            _refuse_packed(table.column_names, longest, max_length)
        if longest > max_length or pa.types.is_fixed_size_list(field.type):
            rows = cut_rows(read_ragged(table[index], field.name), max_length, keep_end=keep_end)
            column = write_ragged(rows, field.type)
            table = table.set_column(index, pa.field(field.name, column.type), column)
    return table


def _cut_row(row: Row, max_length: int, keep_end: bool) -> RowDict:
    """The columns of a row that are cut: lists, arrays and tensors of numbers."""
    cut = {}
    for name, items in row.items():
        if (isinstance(items, list) or getattr(items, "ndim", 0) == 1) and len(items) > max_length:
            first = items[0].item() if hasattr(items[0], "item") else items[0]
            if isinstance(first, Number):
                _refuse_packed(row, len(items), max_length)
                cut[name] = items[-max_length:] if keep_end else items[:max_length]
    return cut


def _refuse_packed(columns: Container[str], longest: int, max_length: int) -> None:
    if "seq_lengths" in columns:
        text = f"a packed row has {longest} tokens, more than max_length {max_length}"
        raise ValueError(f"{text}. Truncate before packing, or raise it.")


def truncate_with_protected_tokens(ids: list[int], target_length: int, protected_tokens: Sequence[int]) -> list[int]:
    """The last tokens and all `protected_tokens`, `target_length` altogether, in order. Raises: ValueError for more.

    >>> truncate_with_protected_tokens([9, 1, 2, 3], 2, [9])
    [9, 3]
    """
    protected = set(protected_tokens)
    room = target_length - sum(token in protected for token in ids)
    if room < 0:
        least = target_length - room
        raise ValueError(f"target_length must be at least {least}, the protected tokens, got {target_length}.")
    others = [position for position, token in enumerate(ids) if token not in protected]
    dropped = set(others[: max(len(others) - room, 0)])
    return [token for position, token in enumerate(ids) if position not in dropped]
