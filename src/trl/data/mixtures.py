"""One training set from several sources."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets

from trl.data.formats import column_names
from trl.data.sources import load_source
from trl.options.checks import read_text_values
from trl.options.groups import option

SPLIT_SEED = 0  # every process must draw the same test rows


@dataclass
class DatasetConfig:
    """One source of a mixture: what `datasets.load_dataset` takes, and the columns to keep."""

    path: str = field(
        metadata={"help": "File (.json, .jsonl, .parquet, .csv), folder, or name of a data set on the hub."}
    )
    name: str | None = option(None, "Configuration of the data set, where it has several.")
    data_dir: str | None = option(None, "Folder within the data set to read from.")
    data_files: str | list[str] | dict[str, str] | None = option(
        None, "Files within the data set to read: one, several, or several by split."
    )
    split: str = option("train", "Split to take; slices such as train[:10%] are understood.")
    columns: list[str] | None = option(
        None, "Columns to keep, all of them by default. All sources must end with the same."
    )


@dataclass
class DatasetMixtureConfig:
    """The sources of a mixture and what is done with all of them together.

    Raises: ValueError for a source with unknown keys or without a path, and for a `test_split_size` that is neither a
        share in (0, 1) nor a number of rows.
    """

    datasets: list[DatasetConfig] = option(
        [], "Sources, laid one after another. In a config file each is a mapping with at least `path`."
    )
    streaming: bool = option(False, "Whether to read rows as they are needed instead of all at once.")
    test_split_size: float | None = option(
        None,
        "Share of all rows, in (0, 1), or number of rows, drawn into a `test` split. None makes no such split.",
    )

    def __post_init__(self) -> None:
        read_text_values(self)
        self.datasets = [_read_config(index, source) for index, source in enumerate(self.datasets or [])]
        size = self.test_split_size
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise ValueError(
                f"test_split_size must be a share in (0, 1) or a whole number of rows, got {size}. Use None for no split."
            )
        if self.test_split_size is not None and self.streaming:
            raise ValueError(
                f"test_split_size is {self.test_split_size} with streaming=True, but a stream has no known length to share "
                "out. Give a source with its own test split, or set streaming=False."
            )


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """All sources of a mixture one after another as the split "train", and with `test_split_size` a split "test".

    Rows of "test" are drawn with a fixed seed, the same in every process. A streaming mixture comes as an
    `IterableDatasetDict`.

    Raises: ValueError where there is no source, a column is missing, or sources differ in their columns.
    """
    if not mixture_config.datasets:
        raise ValueError("a mixture needs at least 1 data set, got 0. List them under `datasets:`.")
    parts = [_load_part(source, mixture_config.streaming) for source in mixture_config.datasets]
    first = mixture_config.datasets[0].path, sorted(column_names(parts[0]))
    for source, part in zip(mixture_config.datasets, parts, strict=True):
        if sorted(column_names(part)) != first[1]:
            raise ValueError(
                f"{first[0]!r} has the columns {first[1]}, but {source.path!r} has {sorted(column_names(part))}: a mixture "
                "needs the same in all. Choose common ones with `columns`, or rename."
            )
    if mixture_config.streaming:
        streams = cast(list[IterableDataset], parts)
        return cast(DatasetDict, IterableDatasetDict({"train": concatenate_datasets(streams)}))
    combined = concatenate_datasets(cast(list[Dataset], parts))
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": combined})
    size = mixture_config.test_split_size
    if size >= len(combined):
        raise ValueError(
            f"test_split_size is {int(size)} rows and the mixture has {len(combined)}, expected fewer. Lower it, or give a share."
        )
    return combined.train_test_split(test_size=int(size) if size >= 1 else size, seed=SPLIT_SEED)


def _read_config(index: int, source: DatasetConfig | Mapping[str, Any]) -> DatasetConfig:
    if isinstance(source, DatasetConfig):
        return source
    place, known = f"datasets[{index}]", [item.name for item in fields(DatasetConfig)]
    if not isinstance(source, Mapping):
        raise TypeError(
            f"{place} is {source!r}, expected a mapping with at least `path`. Write `- path: ...`."
        )
    for key in (key for key in source if key not in known):
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
        raise ValueError(f"{place} has the unknown key {key!r}, known are {known}. {hint}")
    if "path" not in source:
        raise ValueError(f"{place} has no `path`, only {sorted(source)}. Add the file, folder or name.")
    return DatasetConfig(**source)


def _load_part(source: DatasetConfig, streaming: bool) -> Dataset | IterableDataset:
    options = {
        item.name: getattr(source, item.name)
        for item in fields(source)
        if item.name not in ("path", "columns")
    }
    part = cast(Dataset | IterableDataset, load_source(source.path, streaming=streaming, **options))
    if source.columns is None:
        return part
    known = column_names(part)
    if missing := [name for name in source.columns if name not in known]:
        raise ValueError(f"{source.path!r} has no columns {missing}, there are {known}. Correct `columns`.")
    return part.select_columns(source.columns)
