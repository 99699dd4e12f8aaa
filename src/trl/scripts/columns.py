"""Renaming the columns of a dataset."""

from collections.abc import Mapping
from typing import TypeVar

from datasets import Dataset, IterableDataset

from trl.data.formats import column_names
from trl.scripts.suggestions import did_you_mean

Rows = TypeVar("Rows", Dataset, IterableDataset)


def rename_columns(dataset: Rows, renames: Mapping[str, str], *, name: str) -> Rows:
    """The dataset with its columns renamed (old name -> new name); `name` is what errors call the dataset.

    Raises:
        ValueError: if a column to rename is missing, or a new name is taken by another column.
    """
    if not renames:
        return dataset
    present = column_names(dataset)
    for old in renames:
        if old not in present:
            raise ValueError(
                f"column_mapping renames `{old}`, which is no column of {name}: it has {', '.join(present)}."
                f"{did_you_mean(old, present)}"
            )
    taken = [new for new in renames.values() if new in present and new not in renames]
    if taken:
        raise ValueError(f"column_mapping gives a column the name `{taken[0]}`, which {name} already has.")
    return dataset.rename_columns(dict(renames))
