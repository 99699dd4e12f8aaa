import pytest
from datasets import Dataset

from trl.scripts.loading import column_names, rename_columns

ROWS = {"question": ["1+1?"], "answer": ["2"], "text": ["x"]}
RENAMES = {"question": "prompt", "answer": "completion"}


@pytest.mark.parametrize("streaming", [False, True])
def test_renames(streaming):
    rows = Dataset.from_dict(ROWS)
    renamed = rename_columns(rows.to_iterable_dataset() if streaming else rows, RENAMES, name="train")
    assert next(iter(renamed)) == {"prompt": "1+1?", "completion": "2", "text": "x"}
    assert column_names(renamed) == ["prompt", "completion", "text"]


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"`questoin`, which is no column of split 'train': .* question, answer, text"):
        rename_columns(Dataset.from_dict(ROWS), {"questoin": "prompt"}, name="split 'train'")


def test_a_name_that_is_taken():
    with pytest.raises(ValueError, match="the name `text`, which train already has"):
        rename_columns(Dataset.from_dict(ROWS), {"question": "text"}, name="train")
