import json
from pathlib import Path

import pytest
from datasets import DatasetDict, IterableDatasetDict
from transformers import HfArgumentParser

from trl.data.sources import DatasetConfig, DatasetMixtureConfig, get_dataset


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for name, rows in {
        "first": [{"text": f"a{n}", "n": n} for n in range(6)],
        "second": [{"text": f"b{n}", "n": n} for n in range(4)],
        "other": [{"prompt": "p", "n": 1}],
    }.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_one_after_another(streaming: bool):
    config = DatasetMixtureConfig(
        datasets=[{"path": "first.jsonl"}, DatasetConfig(path="second.jsonl")], streaming=streaming
    )
    loaded = get_dataset(config)
    assert type(loaded) is (IterableDatasetDict if streaming else DatasetDict)
    assert list(loaded) == ["train"]
    assert [row["text"] for row in loaded["train"]] == [f"a{n}" for n in range(6)] + [f"b{n}" for n in range(4)]


def test_columns_make_different_sources_alike():
    parts = [{"path": "first.jsonl", "columns": ["n"]}, {"path": "other.jsonl", "columns": ["n"]}]
    loaded = get_dataset(DatasetMixtureConfig(datasets=parts))
    assert list(loaded["train"]) == [{"n": n} for n in [*range(6), 1]]


def test_the_test_split_is_the_same_every_time():
    config = DatasetMixtureConfig(datasets=[{"path": "first.jsonl"}, {"path": "second.jsonl"}], test_split_size=0.2)
    once, again = get_dataset(config), get_dataset(config)
    assert {name: len(part) for name, part in once.items()} == {"train": 8, "test": 2}
    assert once["test"][:] == again["test"][:]
    assert len({*once["train"]["text"], *once["test"]["text"]}) == 10


def test_the_test_split_may_be_a_number_of_rows():
    sources = [{"path": "first.jsonl"}, {"path": "second.jsonl"}]
    for size in (3, 3.0):  # command lines give a float
        found = get_dataset(DatasetMixtureConfig(datasets=sources, test_split_size=size))
        assert {name: len(part) for name, part in found.items()} == {"train": 7, "test": 3}
    with pytest.raises(ValueError, match="test_split_size=10"):
        get_dataset(DatasetMixtureConfig(datasets=sources, test_split_size=10))


def test_columns_that_are_missing_or_differ_are_named():
    missing = DatasetMixtureConfig(datasets=[{"path": "first.jsonl", "columns": ["txt"]}])
    with pytest.raises(ValueError, match=r"'first.jsonl' has no columns \['txt'\], there are"):
        get_dataset(missing)
    differing = DatasetMixtureConfig(datasets=[{"path": "first.jsonl"}, {"path": "other.jsonl"}])
    with pytest.raises(ValueError, match=r"\['n', 'text'\], 'other.jsonl' \['n', 'prompt'\]"):
        get_dataset(differing)


def test_the_argument_parser_takes_it():
    with pytest.raises(ValueError, match="at least 1 data set, got 0"):
        get_dataset(DatasetMixtureConfig())
    parser = HfArgumentParser(DatasetMixtureConfig)
    (config,) = parser.parse_args_into_dataclasses(["--datasets", "first.jsonl", "--streaming", "true"])
    assert config == DatasetMixtureConfig([DatasetConfig("first.jsonl")], streaming=True)
    (config,) = parser.parse_dict({"datasets": [{"path": "first.jsonl"}], "test_split_size": 0.5})
    assert config.datasets == [DatasetConfig("first.jsonl")]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"datasets": [{"pth": "x"}]},
            ValueError,
            r"datasets\[0\] has the unknown key 'pth'.*Did you mean path\?",
        ),
        ({"datasets": [{"path": "x"}, {"name": "x"}]}, ValueError, r"datasets\[1\] has no `path`"),
        ({"datasets": ["x"]}, TypeError, r"datasets\[0\] must be a mapping"),
        ({"test_split_size": 1.5}, ValueError, "test_split_size"),
        ({"test_split_size": 0}, ValueError, "test_split_size"),
        ({"test_split_size": 0.5, "streaming": True}, ValueError, "test_split_size"),
    ],
)
def test_wrong_configs(arguments, error, message: str):
    with pytest.raises(error, match=message):
        DatasetMixtureConfig(**arguments)
