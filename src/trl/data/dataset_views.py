"""The format in which a data set hands out its rows, kept across a transformation that works on arrow."""

from __future__ import annotations

from typing import cast

from datasets import Dataset, Features, IterableDataset, List


def restore_format(transformed: Dataset, original: Dataset) -> Dataset:
    """`transformed` in the format of `original`; a choice of columns is kept as far as they still exist."""
    kept = original.format
    columns = [name for name in kept["columns"] if name in transformed.column_names]
    everything = set(original.column_names) <= set(kept["columns"])
    return transformed.with_format(
        kept["type"],
        columns=None if everything else columns,
        output_all_columns=kept["output_all_columns"],
        **kept["format_kwargs"],
    )


def restore_streaming_format(transformed: IterableDataset, original: IterableDataset) -> IterableDataset:
    """`transformed` in the format of `original`."""
    kept = original._formatting  # datasets 5 has no public way to read it
    return transformed.with_format(kept.format_type if kept else None)


def without_list_sizes(features: Features | None) -> Features | None:
    """The features with every fixed-size list made a free one, because cutting and packing change sizes.

    >>> from datasets import Value
    >>> without_list_sizes(Features({"ids": List(Value("int64"), length=3)}))
    {'ids': List(Value('int64'))}
    """
    if features is None:
        return None
    return Features({name: _without_size(kind) for name, kind in features.items()})


def _without_size(kind: object) -> object:
    return List(cast(List, kind).feature) if isinstance(kind, List) else kind
