import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl.data.sources import load_source

ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": 2}, {"text": "c", "n": 3}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write_jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_any(path: Path) -> Path:
    rows = Dataset.from_list(ROWS)
    if path.suffix == ".parquet":
        rows.to_parquet(path)
    elif path.suffix == ".csv":
        rows.to_csv(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        write_jsonl(path, ROWS)
    return path


@pytest.mark.parametrize(
    ("file", "streaming"),
    [
        ("x.jsonl", False),
        ("x.jsonl", True),
        ("x.json", False),
        ("x.csv", False),
        ("x.parquet", True),
        ("x.JSONL", False),
    ],
)
def test_files(tmp_path: Path, file: str, streaming: bool):
    path = str(write_any(tmp_path / file))
    loaded = load_source(path, streaming=streaming)
    assert list(loaded) == ["train"]
    assert list(loaded["train"]) == ROWS
    train = load_source(path, split="train", streaming=streaming)
    assert isinstance(train, IterableDataset if streaming else Dataset)
    assert list(train) == ROWS


def test_a_folder_gives_its_splits(tmp_path: Path):
    write_jsonl(tmp_path / "rows" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "rows" / "test.jsonl", ROWS[:1])
    loaded = load_source("rows")
    assert isinstance(loaded, DatasetDict)
    assert {name: len(part) for name, part in loaded.items()} == {"train": 3, "test": 1}
    assert list(load_source(str(tmp_path / "rows"), split="test")) == ROWS[:1]
    assert list(load_source("rows", split="train[:2]")) == ROWS[:2]
    assert list(load_source("rows", data_files="test.jsonl", split="train")) == ROWS[:1]


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_data_sets(tmp_path: Path, streaming: bool):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "dev": rows.select([0])}).save_to_disk(tmp_path / "several")
    assert list(load_source("one", split="train", streaming=streaming)) == ROWS
    assert list(load_source("several", split="dev", streaming=streaming)) == ROWS[:1]
    assert list(load_source("several", streaming=streaming)) == ["train", "dev"]
    with pytest.raises(ValueError, match=r"split 'test' is not in 'several': there are \['dev', 'train'\]"):
        load_source("several", split="test", streaming=streaming)


def test_slices_of_saved_data_sets(tmp_path: Path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "dev": rows.select([2])}).save_to_disk(tmp_path / "several")
    assert list(load_source("one", split="train[:2]")) == ROWS[:2]
    assert list(load_source("one", split="train[67%:]")) == ROWS[2:]
    assert list(load_source("several", split="dev+train[:1]")) == [ROWS[2], ROWS[0]]
    with pytest.raises(ValueError, match=r"split 'tset\[:2\]' is not in 'one'.*'train'"):
        load_source("one", split="tset[:2]")


@pytest.mark.parametrize("streaming", [False, True])
def test_unknown_split(tmp_path: Path, streaming: bool):
    path = str(write_jsonl(tmp_path / "x.jsonl", ROWS))
    with pytest.raises(ValueError, match=r"split 'tset' is not in .*x.jsonl.*\['train'\]"):
        load_source(path, split="tset", streaming=streaming)


@pytest.mark.parametrize("path", ["missing.jsonl", "./missing", "org/missing"])
def test_missing_files_are_named_with_where_they_were_looked_for(tmp_path: Path, path: str):
    with pytest.raises(FileNotFoundError) as caught:
        load_source(path)
    assert repr(path) in str(caught.value)
    assert str((tmp_path / path).absolute()) in str(caught.value)


def test_a_folder_without_data(tmp_path: Path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "notes.xyz").write_text("x")
    with pytest.raises(FileNotFoundError, match="'rows' was not found"):
        load_source("rows")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a": \n', r"x.jsonl', line 3: broken JSON, Expecting value \(column"),
        ("x.jsonl", '{"a": 1}\n[1, 2]\n', r"x.jsonl', line 2: a JSON list, expected an object"),
        ("x.json", '[{"a": 1},\n {"a": 2}\n', r"x.json', line 3: broken JSON, Expecting ',' delimiter"),
        ("x.jsonl", "", "x.jsonl' is empty"),
        ("x.xml", "<a/>", r"must end with .json, .jsonl, .parquet, .csv, got '.xml'"),
        ("x.parquet", "no parquet", "x.parquet' could not be read: .*Parquet"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, content: str, message: str):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_source(str(tmp_path / file))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("file", ["x.jsonl", "x.csv"])
def test_other_encodings_are_named_with_their_line(tmp_path: Path, file: str, streaming: bool):
    """datasets loads a Latin-1 file, and fails where its rows are read."""
    form = "{}\n" if file == "x.csv" else '{{"text": "{}"}}\n'
    lines = [form.format(text) for text in ("text", "caf\xe9", "b", "na\xefve")]
    (tmp_path / file).write_bytes("".join(lines).encode("latin-1"))
    column = len(lines[1].partition("\xe9")[0]) + 1
    with pytest.raises(ValueError, match=rf"{file}', line 2: not UTF-8, byte 0xe9 \(column {column}\)"):
        load_source(file, split="train", streaming=streaming)


def test_a_broken_file_in_a_folder_is_named(tmp_path: Path):
    write_jsonl(tmp_path / "rows" / "train.jsonl", ROWS)
    (tmp_path / "rows" / "test.jsonl").write_text('{"text": "a", "n": 1}\n{"text"\n')
    with pytest.raises(ValueError, match=r"test.jsonl', line 2: broken JSON"):
        load_source("rows")
