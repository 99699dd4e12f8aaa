"""Several short sequences in one row: best-fit decreasing, or cut from one long stream."""

import logging
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List, Value

from trl.data.formats import DatasetType, RowDict
from trl.data.ragged import (
    Ragged,
    gather_rows,
    is_list,
    is_number_list,
    read_ragged,
    restore_format,
    without_list_sizes,
    write_ragged,
)

logger = logging.getLogger(__name__)

ROWS = ""  # the rows that each packed row consists of
ROWS_AT_ONCE = 100_000  # bounds memory; a streaming data set takes `map`'s own 1000


def pack_dataset(
    dataset: DatasetType, seq_length: int, strategy: str = "bfd", map_kwargs: RowDict | None = None
) -> DatasetType:
    """Rows of up to `seq_length` tokens, each made of several rows of `dataset`; all columns are lists per token.

    Lists of lists (a teacher's columns) may have fewer entries than tokens; `bfd` joins them.

    `bfd` (best-fit decreasing) keeps sequences whole: longest first, each goes where the least space is left that
    still holds it. Rows longer than `seq_length` are cut to it, rows without tokens are left out with a warning. Both
    sequences and packed rows are in descending order of length (of the longest sequence), equal ones in the order of
    the data set; the column `seq_lengths` says where one ends. `wrapped` joins everything and cuts it every
    `seq_length` tokens, through sequences; the last row keeps what is left.

    Works on 100,000 rows at a time (1,000 of a stream; or `map_kwargs["batch_size"]`), in one process, so that the
    result does not depend on `num_proc`. Raises: ValueError for an unknown strategy, `seq_length` < 1, a column that is
    not a list of numbers, or a row whose columns differ in length.

    >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]]})
    >>> pack_dataset(rows, 4)[:]
    {'input_ids': [[1, 2, 3, 4], [5, 6]], 'seq_lengths': [[3, 1], [2]]}
    >>> pack_dataset(rows, 4, "wrapped")[:]
    {'input_ids': [[1, 2, 3, 4], [5, 6]]}
    """
    if seq_length < 1:
        raise ValueError(f"seq_length must be >= 1, got {seq_length}.")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {sorted(STRATEGIES)}, got {strategy!r}.")
    if isinstance(dataset, Mapping):
        parts = cast(Mapping[str, Dataset], dataset)
        packed = {name: pack_dataset(part, seq_length, strategy, map_kwargs) for name, part in parts.items()}
        return cast(Any, type(dataset))(packed)
    features, as_arrow = without_list_sizes(dataset.features), dataset.with_format("arrow")
    if features is not None and strategy == "bfd":
        features["seq_lengths"] = List(Value("int64"))
    settings = {"seq_length": seq_length, "strategy": strategy}
    options = {name: value for name, value in (map_kwargs or {}).items() if name != "num_proc"}
    if any(isinstance(getattr(kind, "feature", None), List) for kind in (features or {}).values()):
        options.setdefault("batch_size", 1000)  # of large rows
    if not isinstance(dataset, Dataset):
        size = options.get("batch_size", 1000)
        rows = as_arrow.map(pack_table, batched=True, batch_size=size, features=features, fn_kwargs=settings)
        return restore_format(rows, dataset)
    if not len(dataset):
        _check_columns(cast(Any, as_arrow)[:])
        rows = Dataset.from_dict({name: [] for name in features or ()}, features=features)
    else:
        options = {"batch_size": ROWS_AT_ONCE, **options, "remove_columns": dataset.column_names}
        rows = as_arrow.map(pack_table, batched=True, features=features, fn_kwargs=settings, **options)
    return restore_format(rows, dataset)


def pack_table(table: pa.Table, seq_length: int, strategy: str) -> pa.Table:
    """`pack_dataset` on an arrow table."""
    nested = [field.name for field in table.schema if is_list(field.type) and is_number_list(field.type.value_type)]
    lists, table = table.select(nested), table.drop_columns(nested)
    _check_columns(table)
    columns = {name: read_ragged(table[name], name) for name in table.column_names}
    _check_lengths(columns)
    for name in nested:
        _check_nested(name, lists[name], next(iter(columns.values())).lengths, seq_length)
    packed, kinds = STRATEGIES[strategy](columns, seq_length), {"seq_lengths": pa.list_(pa.int64())}
    kinds |= {name: table.schema.field(name).type for name in table.column_names}
    rows = packed.pop(ROWS, None)
    written: dict[str, object] = {name: write_ragged(ragged, kinds[name]) for name, ragged in packed.items()}
    for name in nested:
        if rows is None:
            raise ValueError(f"column {name!r} has lists of lists, which strategy {strategy!r} cannot cut. Use 'bfd'.")
        kind = lists.schema.field(name).type
        whole = lists[name].cast(pa.large_list(kind.value_type)).combine_chunks()
        joined = pc.list_slice(whole.take(pa.array(rows.values)), 0, seq_length)  # type: ignore[attr-defined]
        ends = np.append(0, pc.list_value_length(joined).to_numpy().cumsum())[rows.offsets]  # type: ignore[attr-defined]
        packed_lists = pa.LargeListArray.from_arrays(ends, joined.flatten())
        written[name] = packed_lists if pa.types.is_large_list(kind) else packed_lists.cast(pa.list_(kind.value_type))
    return pa.table(written)


class Bins(NamedTuple):
    """Bin b holds the rows `rows[offsets[b] : offsets[b + 1]]`, in the order in which they lie in it."""

    rows: np.ndarray
    offsets: np.ndarray


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Bins:
    """Rows to bins, longest first: into the bin with the least space that holds it, the oldest of equal ones.

    `lengths` (N,) in tokens, each in [1, capacity]. Bins are numbered as they were opened. Time is O(N log N) for the
    sort, then almost constant per row. Source: Ding et al. 2024, section 3.2 (arXiv:2404.10830).

    >>> best_fit_decreasing(np.array([3, 1, 2, 4]), capacity=5)
    Bins(rows=array([3, 1, 0, 2]), offsets=array([0, 2, 4]))
    """
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), dtype=np.int64)
    open_bins: defaultdict[int, deque[int]] = defaultdict(deque)  # by the space that is left in them
    spaces: list[int] = []  # of the open bins, ascending
    opened = 0
    for place, length in enumerate(lengths[order].tolist()):
        fit = bisect_left(spaces, length)
        if fit == len(spaces):
            space, bin_index = capacity, opened
            opened += 1
        else:
            space = spaces[fit]
            bin_index = open_bins[space].popleft()
            if not open_bins[space]:
                del spaces[fit]
        bin_of[place] = bin_index
        if left := space - length:
            if not open_bins[left]:
                insort(spaces, left)
            open_bins[left].append(bin_index)
    counts = np.bincount(bin_of, minlength=opened)
    return Bins(order[np.argsort(bin_of, kind="stable")], np.concatenate([[0], counts.cumsum()]))


def _pack_bfd(columns: dict[str, Ragged], seq_length: int) -> dict[str, Ragged]:
    lengths = np.minimum(next(iter(columns.values())).lengths, seq_length)
    filled = np.flatnonzero(lengths)
    if len(filled) < len(lengths):
        logger.warning("%d rows without tokens are left out of the packed rows.", len(lengths) - len(filled))
    bins = best_fit_decreasing(lengths[filled], seq_length)
    rows = filled[bins.rows]
    sizes = lengths[rows]
    ends = np.concatenate([[0], sizes.cumsum()])[bins.offsets]
    rows_list, sizes_list = rows.tolist(), sizes.tolist()
    packed = {name: Ragged(gather_rows(column, rows_list, sizes_list), ends) for name, column in columns.items()}
    return {**packed, "seq_lengths": Ragged(sizes, bins.offsets), ROWS: Ragged(rows, bins.offsets)}


def _pack_wrapped(columns: dict[str, Ragged], seq_length: int) -> dict[str, Ragged]:
    total = int(next(iter(columns.values())).offsets[-1])
    cuts = np.append(np.arange(0, total, seq_length), total)
    return {name: Ragged(ragged.values, cuts) for name, ragged in columns.items()}


STRATEGIES: Mapping[str, Callable[[dict[str, Ragged], int], dict[str, Ragged]]] = {
    "bfd": _pack_bfd,
    "wrapped": _pack_wrapped,
}


def _check_columns(table: pa.Table) -> None:
    if not table.column_names:
        raise ValueError("the data set has no columns, packing needs at least input_ids. Tokenize it first.")
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if not is_number_list(kind):
            raise ValueError(f"column {name!r} is {kind}, packing needs a list of numbers. Remove it.")


def _check_lengths(columns: Mapping[str, Ragged]) -> None:
    main = "input_ids" if "input_ids" in columns else next(iter(columns))
    expected = columns[main].lengths
    for name, ragged in columns.items():
        wrong = np.flatnonzero(ragged.lengths != expected)
        if len(wrong):
            row = int(wrong[0])
            fault = f"{ragged.lengths[row]} items, but {main!r} has {expected[row]}"
            raise ValueError(f"column {name!r}, row {row}: {fault}. Correct or remove it.")


def _check_nested(name: str, column: pa.ChunkedArray, tokens: np.ndarray, seq_length: int) -> None:
    """Lists of lists must be there, and as many as the row has tokens where that is cut."""
    counts = pc.fill_null(pc.list_value_length(column), -1).to_numpy()  # type: ignore[attr-defined]
    wrong = np.flatnonzero((counts < 0) | ((tokens > seq_length) & (counts != tokens)))
    if len(wrong):
        row = int(wrong[0])
        fault = "None" if counts[row] < 0 else f"{counts[row]} lists for {tokens[row]} tokens"
        expected = f"lists, one per token in rows longer than seq_length={seq_length}"
        raise ValueError(f"column {name!r}, row {row}: {fault}, expected {expected}. Correct or shorten the row.")
