import dataclasses

import pytest

from trl.scripts.arguments import ColumnMapping, ScriptArguments

# The whole table of level 0.26.
DEFAULTS = {
    "dataset_name": None,
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "gradient_checkpointing_use_reentrant": False,
    "ignore_bias_buffers": False,
}


def test_every_default_and_the_order():
    ours = {"dry_run": False}
    assert list(dataclasses.asdict(ScriptArguments()).items()) == list({**DEFAULTS, **ours}.items())
    assert all(field.metadata["help"] for field in dataclasses.fields(ScriptArguments))


def test_column_mapping():
    assert ColumnMapping().renames() == {}
    assert ColumnMapping(["question=prompt", "a=b"]).renames() == {"question": "prompt", "a": "b"}


@pytest.mark.parametrize("items", [["question"], ["=prompt"], ["question="], ["a=b", "a=c"], ["a=c", "b=c"]])
def test_bad_column_mappings(items):
    with pytest.raises(ValueError, match="column_mapping"):
        ColumnMapping(items)
