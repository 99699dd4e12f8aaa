"""Where rows come from: files, folders, data sets saved to disk, and the hub, under one call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from datasets.exceptions import (
    DataFilesNotFoundError,
    DatasetGenerationError,
    DatasetNotFoundError,
)

AnyDataset = Dataset | DatasetDict | IterableDataset | IterableDatasetDict
DataFiles = str | Sequence[str] | Mapping[str, Any] | None

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_SAVED_MARKS = ("dataset_dict.json", "state.json")


def load_source(
    path: str,
    *,
    name: str | None = None,
    split: str | None = None,
    data_files: DataFiles = None,
    data_dir: str | None = None,
    streaming: bool = False,
) -> AnyDataset:
    """The rows under `path`: one split where `split` is given, else all splits by name.

    `path` is a .json, .jsonl, .parquet or .csv file (its split is "train"), a folder of such files (those named after
    a split, like train.jsonl and test.jsonl, become it), a folder that `save_to_disk` wrote, or the name of a data set
    on the hub. `name`, `data_files` and `data_dir` go to `datasets.load_dataset`, which also keeps the cache: it locks
    and renames, so that two processes may load the same files.

    Raises: FileNotFoundError for what does not exist; ValueError for an unknown kind of file, a file without rows, a
    broken line (with its number) or an unknown split (naming those there are).
    """
    place = Path(path).expanduser()
    if any((place / mark).is_file() for mark in _SAVED_MARKS):
        return _pick_split(_load_saved(place, streaming), split, path)
    if place.is_file():
        data_files = {"train": str(place)}
    files = _local_files(place, data_files)
    _refuse_empty(files)
    try:
        return datasets.load_dataset(
            _builder(place, path),
            name,
            split=split,
            data_files=data_files,
            data_dir=data_dir,
            streaming=streaming,
        )
    except (DatasetNotFoundError, DataFilesNotFoundError, ConnectionError) as error:
        raise _not_found(path, str(error)) from error
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        _refuse_broken_json(files)
        raise ValueError(
            f"{path!r} could not be read: {error.__cause__ or error} Repair the file."
        ) from error
    except ValueError as error:
        if split is None or not str(error).startswith(("Unknown split", "Bad split")):
            raise
        raise ValueError(f"split {split!r} is not in {path!r}: {error} Choose one of these.") from error


def _builder(place: Path, path: str) -> str:
    if place.is_dir():
        return str(place)
    if not place.is_file():
        if _looks_local(path):
            raise _not_found(path, "nothing is there")
        return path
    builder = BUILDERS.get(place.suffix.lower())
    if builder is None:
        raise ValueError(
            f"{path!r} has the extension {place.suffix!r}, known are {', '.join(BUILDERS)}. Convert it to one of these."
        )
    return builder


def _load_saved(folder: Path, streaming: bool) -> DatasetDict | IterableDatasetDict:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, Dataset):
        saved = DatasetDict({str(saved.split or "train"): saved})
    if streaming:
        return IterableDatasetDict({name: part.to_iterable_dataset() for name, part in saved.items()})
    return saved


def _pick_split(loaded: DatasetDict | IterableDatasetDict, split: str | None, path: str) -> AnyDataset:
    if split is None:
        return loaded
    if split not in loaded:
        known = sorted(map(str, loaded))
        raise ValueError(f"split {split!r} is not in {path!r}: there are {known}. Choose one of these.")
    return loaded[split]


def _looks_local(path: str) -> bool:
    return (
        path.startswith((".", "/", "~"))
        or Path(path).suffix.lower() in BUILDERS
        or path.strip("/").count("/") > 1
    )


def _not_found(path: str, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{path!r} was not found (looked at {Path(path).expanduser().absolute()}, then on the hub unless it is a path): "
        f"{reason}. Give a {', '.join(BUILDERS)} file, a folder of such files, a folder that save_to_disk wrote, or the "
        "name of a data set that can be reached on the hub."
    )


def _local_files(place: Path, data_files: DataFiles) -> list[Path]:
    if place.is_dir() and data_files is None:
        return sorted(file for file in place.rglob("*") if file.suffix.lower() in BUILDERS)
    groups = data_files.values() if isinstance(data_files, Mapping) else [data_files or []]
    named = [file for group in groups for file in ([group] if isinstance(group, str) else group)]
    candidates = [Path(str(file)).expanduser() for file in named]
    return [
        file if file.is_file() else place / file
        for file in candidates
        if file.is_file() or (place / file).is_file()
    ]


def _refuse_empty(files: list[Path]) -> None:
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(
                f"{str(file)!r} is empty, expected at least one row. Write the rows or leave it out."
            )


def _refuse_broken_json(files: list[Path]) -> None:
    for file in files:
        if BUILDERS.get(file.suffix.lower()) == "json" and not _is_one_json_list(file):
            for number, line in _lines(file):
                _check_line(file, number, line)


def _is_one_json_list(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as stream:
        if not stream.read(1024).lstrip().startswith("["):
            return False
        stream.seek(0)
        try:
            json.load(stream)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{str(file)!r}, line {error.lineno}: broken JSON, {error.msg} (column {error.colno}). Repair the file."
            ) from error
    return True


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        yield from ((number, line) for number, line in enumerate(stream, start=1) if line.strip())


def _check_line(file: Path, number: int, line: str) -> None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{str(file)!r}, line {number}: broken JSON, {error.msg} (column {error.colno}). Repair or remove the line."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{str(file)!r}, line {number}: a JSON {type(row).__name__}, expected an object with the columns of a row. "
            "Repair or remove the line."
        )
