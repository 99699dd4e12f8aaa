"""Where rows come from: files, folders, data sets saved to disk, and the hub, under one call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
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

from trl.data.hub import HubUnreachable, loading_from_hub, may_be_on_hub

AnyDataset = Dataset | DatasetDict | IterableDataset | IterableDatasetDict
DataFiles = str | Sequence[str] | Mapping[str, Any] | None

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
STREAM_CHECKED = 1 << 24  # characters of a streamed file that are looked at in advance
_MOST_FAULTS = 20
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
    broken line (all of them, with file and number) or an unknown split (naming those there are).
    """
    place = Path(path).expanduser()
    if any((place / mark).is_file() for mark in _SAVED_MARKS):
        loaded = _load_saved(place, streaming)
        if split is not None and split not in loaded:
            known = sorted(map(str, loaded))
            raise ValueError(f"split {split!r} is not in {path!r}: there are {known}. Choose one of these.")
        return loaded if split is None else loaded[split]
    if place.is_file():
        data_files = {"train": str(place)}
    files = _local_files(place, data_files)
    if empty := [file for file in files if file.stat().st_size == 0]:
        raise ValueError(
            f"{str(empty[0])!r} is empty, expected at least one row. Write the rows or leave it out."
        )
    if not all(_is_utf8(file, most=STREAM_CHECKED if streaming else None) for file in files):
        _refuse_broken_lines(files)
    builder, options = str(place), {"data_files": data_files, "data_dir": data_dir, "streaming": streaming}
    is_path = not may_be_on_hub(path) or place.suffix.lower() in BUILDERS
    if place.is_file():
        builder = BUILDERS.get(place.suffix.lower(), "")
        if not builder:
            raise ValueError(
                f"{path!r} has the extension {place.suffix!r}, known are {', '.join(BUILDERS)}. Convert it to one of these."
            )
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
        raise ValueError(
            f"{path!r} could not be read: {error.__cause__ or error} Repair the file."
        ) from error
    except ValueError as error:
        if split is None or not str(error).startswith(("Unknown split", "Bad split")):
            raise
        raise ValueError(f"split {split!r} is not in {path!r}: {error} Choose one of these.") from error


def _load_saved(folder: Path, streaming: bool) -> DatasetDict | IterableDatasetDict:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, Dataset):
        saved = DatasetDict({str(saved.split or "train"): saved})
    if streaming:
        return IterableDatasetDict({name: part.to_iterable_dataset() for name, part in saved.items()})
    return saved


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
    named = [
        Path(name).expanduser() for group in groups for name in ([group] if isinstance(group, str) else group)
    ]
    found = [file if file.is_file() else place / file for file in named]
    return [file for file in found if file.is_file()]


def _is_utf8(file: Path, *, most: int | None) -> bool:
    """Whether a file of text is UTF-8, as far as its first `most` characters: pyarrow does not look before rows are read."""
    if file.suffix.lower() == ".parquet":
        return True
    try:
        with file.open(encoding="utf-8") as text:
            left = most
            while (left is None or left > 0) and (chunk := text.read(1 << 20)):
                left = None if left is None else left - len(chunk)
    except UnicodeDecodeError:
        return False
    return True


def _refuse_broken_lines(files: list[Path]) -> None:
    """Raise ValueError naming the broken lines of some files."""
    faults = [f"{str(file)!r}, line {line}: {fault}" for file in files for line, fault in _faults(file)]
    if len(faults) > _MOST_FAULTS:
        faults[_MOST_FAULTS:] = [f"... and {len(faults) - _MOST_FAULTS} more lines."]
    if faults:
        raise ValueError("\n".join(faults))


def _faults(file: Path) -> Iterator[tuple[int, str]]:
    """The number of each broken line of a file of text, and what is wrong with it."""
    kind = BUILDERS.get(file.suffix.lower())
    if kind not in ("json", "csv"):
        return
    with file.open("rb") as stream:
        is_list = kind == "json" and stream.read(1024).lstrip().startswith(b"[")
        stream.seek(0)
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig")
                row = json.loads(text) if kind == "json" and not is_list and text.strip() else {}
            except UnicodeDecodeError as error:
                remedy = "Convert the file, from Latin-1 with `iconv -f latin1 -t utf-8`."
                place = f"byte 0x{line[error.start]:02x} (column {error.start + 1})"
                yield number, f"not UTF-8, {place}. {remedy}"
            except json.JSONDecodeError as error:
                yield number, f"broken JSON, {error.msg} (column {error.colno}). Repair or remove the line."
            else:
                if not isinstance(row, dict):
                    expected = "expected an object with the columns of a row. Repair or remove the line."
                    yield number, f"a JSON {type(row).__name__}, {expected}"
    try:
        json.loads(file.read_text(encoding="utf-8", errors="replace")) if is_list else None
    except json.JSONDecodeError as error:
        yield error.lineno, f"broken JSON, {error.msg} (column {error.colno}). Repair the file."
