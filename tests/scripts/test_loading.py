import json
from pathlib import Path

import pytest
from datasets import Dataset

from trl.data.sources import DatasetConfig, DatasetMixtureConfig
from trl.scripts.arguments import ScriptArguments
from trl.scripts.loading import load_train_and_eval


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(10)))
    return str(path)


def load(script_args, mixture=None, *, evaluate=False, renames=None):
    return load_train_and_eval(script_args, mixture or DatasetMixtureConfig(), renames=renames or {}, evaluate=evaluate)


def test_a_file_with_renamed_columns(file):
    train, test = load(ScriptArguments(file), renames={"question": "prompt", "answer": "completion"})
    assert (len(train), train[0], test) == (10, {"prompt": "0?", "completion": "0"}, None)


def test_slices_are_splits_too(file):
    script_args = ScriptArguments(file, dataset_train_split="train[:8]", dataset_test_split="train[8:]")
    train, test = load(script_args, evaluate=True, renames={"question": "prompt"})
    assert (len(train), len(test)) == (8, 2)
    assert test[0] == {"prompt": "8?", "answer": "8"}


def test_streaming(file):
    train, _ = load(ScriptArguments(file, dataset_streaming=True), renames={"question": "prompt"})
    assert next(iter(train)) == {"prompt": "0?", "answer": "0"}


def test_a_missing_test_split_lists_those_there_are_and_the_ways_out(file, tmp_path):
    wanted = (
        r"dataset_test_split: .*'test'.*\['train'\].*--test_split_size.*_train_split 'train\[:90%\]' --dataset_test_split"
        r" 'train\[90%:\]'.*a folder with train.jsonl and test.jsonl.*eval_strategy"
    )
    with pytest.raises(ValueError, match=wanted):
        load(ScriptArguments(file), evaluate=True)
    Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=wanted):
        load(ScriptArguments(str(tmp_path / "saved")), evaluate=True)


def test_files_and_folders_without_the_configuration(file):
    with pytest.raises(ValueError, match=r"dataset_config 'main' is not in .*: a file has none. Leave it out."):
        load(ScriptArguments(file, dataset_config="main"))
    folder = str(Path(file).parent)
    with pytest.raises(ValueError, match=r"dataset_config 'main' is not in .*leave it out: BuilderConfig"):
        load(ScriptArguments(folder, dataset_config="main"))


def test_mixtures(file):
    mixture = DatasetMixtureConfig([DatasetConfig(file), DatasetConfig(file)], test_split_size=0.25)
    train, test = load(ScriptArguments(), mixture, evaluate=True)
    assert (len(train), len(test)) == (15, 5)


def test_test_rows_are_drawn_from_the_training_split(file):
    split = DatasetMixtureConfig(test_split_size=3)
    train, test = load(ScriptArguments(file, dataset_train_split="train[:8]"), split, evaluate=True)
    assert (len(train), len(test)) == (5, 3)
    assert {row["answer"] for row in (*train, *test)} == set("01234567")
    with pytest.raises(ValueError, match="test_split_size=3"):
        load(ScriptArguments(file, dataset_streaming=True), split, evaluate=True)


def test_a_mixture_without_a_test_split(file):
    with pytest.raises(ValueError, match="the mixture has 'train', not 'test'"):
        load(ScriptArguments(), DatasetMixtureConfig([DatasetConfig(file)]), evaluate=True)


def test_exactly_one_source(file):
    with pytest.raises(ValueError, match="No dataset"):
        load(ScriptArguments())
    with pytest.raises(ValueError, match="Both dataset_name"):
        load(ScriptArguments(file), DatasetMixtureConfig([DatasetConfig(file)]))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load(ScriptArguments("nowhere.jsonl"))
