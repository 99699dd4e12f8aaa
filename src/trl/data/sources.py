"""Sources of rows: files, folders, data sets saved to disk, the hub, and mixtures of them."""

from __future__ import annotations  # field types are recorded as they are written

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, ReadInstruction, concatenate_datasets
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError

from trl.data.formats import Row, column_names
from trl.data.hub import HubUnreachable, loading_from_hub, may_be_on_hub
from trl.options.checks import read_text_values
from trl.options.groups import OptionGroup, option
from trl.options.spelling import did_you_mean

AnyDataset = Dataset | DatasetDict | IterableDataset | IterableDatasetDict
DataFiles = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
STREAM_CHECKED = 1 << 24  # characters of a streamed file that are looked at in advance
_SAVED_MARKS = ("dataset_dict.json", "state.json")
SPLIT_SEED = 0  # every process must draw the same test rows


def load_source(
    path: str, *, name: str | None = None, split: str | None = None, data_files: DataFiles = None,
    data_dir: str | None = None, streaming: bool = False,
) -> AnyDataset:  # fmt: skip
    """The rows under `path`: one split where `split` is given, else all splits by name.

    `path` is a .json, .jsonl, .parquet or .csv file (its split is "train"), a folder of such files (those named after a
    split, like train.jsonl and test.jsonl, become it), a folder that `save_to_disk` wrote, or the name of a data set on
    the hub. `name`, `data_files` and `data_dir` go to `datasets.load_dataset`. Raises: FileNotFoundError for what does
    not exist; ValueError for an unknown kind of file, a file without rows, a broken line (the first one, with file and
    number) or an unknown split (naming those there are).
    """
    place = Path(path).expanduser()
    if any((place / mark).is_file() for mark in _SAVED_MARKS):
        return _load_saved(place, path, split, streaming=streaming)
    if place.is_file():
        if name is not None:
            raise ValueError(f"dataset_config {name!r} is not in {path!r}: a file has none. Leave it out.")
        data_files = {"train": str(place)}
    files = _local_files(place, data_files)
    if empty := [file for file in files if file.stat().st_size == 0]:
        raise ValueError(f"{str(empty[0])!r} is empty, expected at least one row.")
    if not all(_is_utf8(file, most=STREAM_CHECKED if streaming else None) for file in files):
        _refuse_broken_lines(files)
    builder, options = str(place), {"data_files": data_files, "data_dir": data_dir, "streaming": streaming}
    is_path = not may_be_on_hub(path) or place.suffix.lower() in BUILDERS
    if place.is_file():
        builder = BUILDERS.get(place.suffix.lower(), "")
        if not builder:
            raise ValueError(f"{path!r} must end with {', '.join(BUILDERS)}, got {place.suffix!r}.")
    elif not place.is_dir():
        if is_path:
            raise _not_found(path, "nothing is there")
        builder = path
    try:
        with nullcontext() if files or is_path else loading_from_hub(path, "dataset"):
            return datasets.load_dataset(builder, name, split=split, **options)
    except HubUnreachable:
        raise
    except (DatasetNotFoundError, DataFilesNotFoundError, ConnectionError) as error:
        raise _not_found(path, str(error)) from error
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        _refuse_broken_lines(files)
        raise ValueError(f"{path!r} could not be read: {error.__cause__ or error} Repair it.") from error
    except ValueError as error:
        if name is not None and str(error).startswith("BuilderConfig"):
            text = f"dataset_config {name!r} is not in {path!r}. Choose another, or leave it out: {error}"
            raise ValueError(text) from error
        if split is None or not str(error).startswith(("Unknown split", "Bad split")):
            raise
        raise ValueError(f"split {split!r} is not in {path!r}: {error} Choose one of these.") from error


def _load_saved(place: Path, path: str, split: str | None, *, streaming: bool) -> AnyDataset:
    loaded = datasets.load_from_disk(str(place))
    loaded = DatasetDict({str(loaded.split or "train"): loaded}) if isinstance(loaded, Dataset) else loaded
    if split is not None and split not in loaded:
        lengths = {str(name): len(part) for name, part in loaded.items()}
        try:
            parts = ReadInstruction.from_spec(split).to_absolute(lengths)
        except ValueError as error:
            there = f"split {split!r} is not in {path!r}: there are {sorted(lengths)}. Choose one of these."
            raise ValueError(there) from error
        slices = [loaded[part.splitname].select(range(part.from_, part.to)) for part in parts]
        loaded = DatasetDict({split: concatenate_datasets(slices)})
    if streaming:
        loaded = IterableDatasetDict({name: part.to_iterable_dataset() for name, part in loaded.items()})
    return loaded if split is None else loaded[split]


def _not_found(path: str, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{path!r} was not found (at {Path(path).expanduser().absolute()}, or on the hub): {reason}. Give a "
        f"{', '.join(BUILDERS)} file, a folder of them, a saved data set, or a name on the hub."
    )


def _local_files(place: Path, data_files: DataFiles) -> list[Path]:
    if place.is_dir() and data_files is None:
        return sorted(file for file in place.rglob("*") if file.suffix.lower() in BUILDERS)
    groups = data_files.values() if isinstance(data_files, Mapping) else [data_files or []]
    named = [Path(name).expanduser() for group in groups for name in ([group] if isinstance(group, str) else group)]
    files = [file if file.is_file() else place / file for file in named]
    return [file for file in files if file.is_file()]


def _is_utf8(file: Path, *, most: int | None) -> bool:
    """Whether a file of text is UTF-8 in its first `most` characters; pyarrow looks only when rows are read."""
    if file.suffix.lower() == ".parquet":
        return True
    try:
        with file.open(encoding="utf-8") as text:
            read = 0
            while (most is None or read < most) and (chunk := text.read(1 << 20)):
                read += len(chunk)
    except UnicodeDecodeError:
        return False
    return True


def _refuse_broken_lines(files: list[Path]) -> None:
    for file in files:
        if fault := _fault(file):
            raise ValueError(f"{str(file)!r}, line {fault[0]}: {fault[1]}")


def _fault(file: Path) -> tuple[int, str] | None:
    """The number of the first broken line of a file of text, and what is wrong with it."""
    kind = BUILDERS.get(file.suffix.lower())
    if kind not in ("json", "csv"):
        return None
    number, line = 0, b""
    try:
        with file.open("rb") as stream:
            is_list = kind == "json" and stream.read(1024).lstrip().startswith(b"[")
            stream.seek(0)
            for number, line in enumerate(stream, start=1):
                text = line.decode("utf-8-sig")
                row = json.loads(text) if kind == "json" and not is_list and text.strip() else {}
                if not isinstance(row, dict):
                    expected = "expected an object with the columns of a row. Repair or remove the line."
                    return number, f"a JSON {type(row).__name__}, {expected}"
        if is_list:
            number = 0
            json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        place = f"byte 0x{line[error.start]:02x} (column {error.start + 1})"
        remedy = "Convert the file, from Latin-1 with `iconv -f latin1 -t utf-8`."
        return number, f"not UTF-8, {place}. {remedy}"
    except json.JSONDecodeError as error:
        fault = f"broken JSON, {error.msg} (column {error.colno}). Repair the line or the file."
        return number or error.lineno, fault
    return None


# ---- mixtures


@dataclass
class DatasetConfig(OptionGroup):
    """One source of a mixture: what `datasets.load_dataset` takes, and the columns to keep."""

    path: str = field(metadata={"help": "File (.json, .jsonl, .parquet, .csv), folder, or name on the hub."})
    name: str | None = option(None, "Configuration of the data set, where it has several.")
    data_dir: str | None = option(None, "Folder within the data set to read from.")
    data_files: str | list[str] | dict[str, str] | None = option(None, "Files to read, or files by split.")
    split: str = option("train", "Split to take; slices such as train[:10%] are understood.")
    columns: list[str] | None = option(None, "Columns to keep, the same in all sources. None: all.")


@dataclass
class DatasetMixtureConfig(OptionGroup):
    """The sources of a mixture and what is done with all of them together.

    Raises: ValueError for a source with unknown keys or without a path, and for a `test_split_size` that is neither a
        share in (0, 1) nor a number of rows.
    """

    datasets: list[DatasetConfig] = option([], "Sources, joined; in a config file mappings with a `path`.")
    streaming: bool = option(False, "Whether to read rows as they are needed instead of all at once.")
    test_split_size: float | None = option(None, "Share in (0, 1), or number, of the rows of a `test` split.")

    def __post_init__(self) -> None:
        read_text_values(self)
        self.datasets = [_read_config(index, source) for index, source in enumerate(self.datasets or [])]
        size = self.test_split_size
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise ValueError(f"test_split_size must be a share in (0, 1), a row count or None, got {size}.")
        if self.test_split_size is not None and self.streaming:
            raise ValueError(f"test_split_size={size} does not work with streaming=True.")


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """All sources of a mixture one after another as the split "train", and with `test_split_size` a split "test".

    Rows of "test" are drawn with a fixed seed. A streaming mixture comes as an `IterableDatasetDict`. Raises:
    ValueError where there is no source, a column is missing, or sources differ in their columns.
    """
    sources, size = mixture_config.datasets, mixture_config.test_split_size
    if not sources:
        raise ValueError("a mixture needs at least 1 data set, got 0. List them under `datasets:`.")
    parts = [_load_part(source, mixture_config.streaming) for source in sources]
    columns = [sorted(column_names(part)) for part in parts]
    for source, names in zip(sources, columns, strict=True):
        if names != columns[0]:
            text = f"{sources[0].path!r} has the columns {columns[0]}, {source.path!r} {names}"
            raise ValueError(f"{text}: choose common ones with `columns`.")
    combined = concatenate_datasets(parts)
    if mixture_config.streaming:
        return cast(DatasetDict, IterableDatasetDict({"train": combined}))
    if size is None:
        return DatasetDict({"train": combined})
    if size >= len(combined):
        raise ValueError(f"test_split_size={int(size)} must be less than the mixture's {len(combined)} rows.")
    return combined.train_test_split(test_size=int(size) if size >= 1 else size, seed=SPLIT_SEED)


def _read_config(index: int, source: DatasetConfig | Row) -> DatasetConfig:
    if isinstance(source, DatasetConfig):
        return source
    place, keys = f"datasets[{index}]", [item.name for item in fields(DatasetConfig)]
    if not isinstance(source, Mapping):
        raise TypeError(f"{place} must be a mapping with at least `path`, got {source!r}.")
    for key in (key for key in source if key not in keys):
        hint = did_you_mean(str(key), keys) or " Remove it."
        raise ValueError(f"{place} has the unknown key {key!r}, known are {keys}.{hint}")
    if "path" not in source:
        raise ValueError(f"{place} has no `path`, only {sorted(source)}. Add the file, folder or name.")
    return DatasetConfig(**source)


def _load_part(source: DatasetConfig, streaming: bool) -> Any:
    options = {name: value for name, value in vars(source).items() if name not in ("path", "columns")}
    part: Any = load_source(source.path, streaming=streaming, **options)
    if source.columns is None:
        return part
    columns = column_names(part)
    if missing := [name for name in source.columns if name not in columns]:
        raise ValueError(f"{source.path!r} has no columns {missing}, there are {columns}. Correct `columns`.")
    return part.select_columns(source.columns)
