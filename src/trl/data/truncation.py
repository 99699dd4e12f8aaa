"""Rows cut to a length: the token columns, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trl.data.formats import DatasetType
from trl.data.ragged import is_number_list, restore_format, restore_streaming_format, without_list_sizes


def truncate_dataset(
    dataset: DatasetType, max_length: int, map_kwargs: dict[str, Any] | None = None
) -> DatasetType:
    """Every row with the first `max_length` items of each token column, that is of each list of numbers.

    Other columns (text, messages, images, nested lists) stay as they are.

    Raises: ValueError for `max_length` < 1, and for a packed row (with `seq_lengths`) that would have to be cut.

    >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "text": ["abc", "d"]})
    >>> truncate_dataset(rows, 2)[:]
    {'input_ids': [[1, 2], [4]], 'text': ['abc', 'd']}
    """
    if max_length < 1:
        raise ValueError(
            f"max_length must be >= 1, got {max_length}. Give the number of tokens to keep, or None."
        )
    if isinstance(dataset, Mapping):
        parts = cast(Mapping[str, Dataset], dataset)
        cut = {name: truncate_dataset(part, max_length, map_kwargs) for name, part in parts.items()}
        return cast(Any, type(dataset))(cut)
    features, given = without_list_sizes(dataset.features), {"max_length": max_length}
    if isinstance(dataset, IterableDataset):
        rows = dataset.with_format(None).map(truncate_row, features=features, fn_kwargs=given)
        return cast(DatasetType, restore_streaming_format(rows, dataset))
    stored = cast(Dataset, dataset)
    if not len(stored):
        return dataset
    options = {**(map_kwargs or {}), "fn_kwargs": given}
    cut = stored.with_format("arrow").map(truncate_table, batched=True, features=features, **options)
    return cast(DatasetType, restore_format(cut, stored))


def truncate_table(table: pa.Table, max_length: int) -> pa.Table:
    """`truncate_dataset` on an arrow table; lists of a fixed size become free ones."""
    for index, field in enumerate(table.schema):
        if not is_number_list(field.type):
            continue
        longest = pc.max(pc.list_value_length(table[index])).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
        if longest > max_length:
            _refuse_packed("seq_lengths" in table.column_names, longest, max_length)
        if longest > max_length or pa.types.is_fixed_size_list(field.type):
            first = pc.list_slice(table[index], 0, max_length, return_fixed_size_list=False)  # pyright: ignore[reportAttributeAccessIssue]
            kind: Any = pa.large_list if pa.types.is_large_list(field.type) else pa.list_
            column = first.cast(kind(field.type.value_type))
            table = table.set_column(index, pa.field(field.name, column.type), column)
    return table


def truncate_row(row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """`truncate_dataset` on one row."""
    lists = {
        name: value for name, value in row.items() if isinstance(value, list) and len(value) > max_length
    }
    cut = {name: value[:max_length] for name, value in lists.items() if isinstance(value[0], Number)}
    if cut:
        _refuse_packed("seq_lengths" in row, max(len(row[name]) for name in cut), max_length)
    return {**row, **cut}


def _refuse_packed(is_packed: bool, longest: int, max_length: int) -> None:
    if is_packed:
        raise ValueError(
            f"a packed row has {longest} tokens, more than max_length {max_length}: cutting it would cut through its "
            "sequences. Truncate before packing, or raise max_length."
        )


def truncate_with_protected_tokens(
    ids: list[int], target_length: int, protected_tokens: Sequence[int]
) -> list[int]:
    """The last tokens of a sequence and all of its `protected_tokens`, `target_length` altogether, in their order.

    Raises: ValueError where there are more protected tokens than that.

    >>> truncate_with_protected_tokens([9, 1, 2, 3], 2, [9])
    [9, 3]
    """
    protected = set(protected_tokens)
    room = target_length - sum(token in protected for token in ids)
    if room < 0:
        raise ValueError(
            f"target_length {target_length} must be at least the number of protected tokens, "
            f"{target_length - room}. Raise it, or protect fewer tokens."
        )
    others = [position for position, token in enumerate(ids) if token not in protected]
    dropped = set(others[: max(len(others) - room, 0)])
    return [token for position, token in enumerate(ids) if position not in dropped]
