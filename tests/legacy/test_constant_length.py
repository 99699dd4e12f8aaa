import itertools

import pytest
import torch
from datasets import Dataset
from tests.words import word_tokenizer

from trl.legacy.text_data import ConstantLengthDataset

TEXTS = ["a b c", "d", "e f a b", "hi yes"]
ROWS = Dataset.from_dict({"text": TEXTS})


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def flat(rows) -> list[int]:
    return [token for row in rows for token in row["input_ids"].tolist()]


def test_rows_by_hand(tokenizer):
    ids = tokenizer.convert_tokens_to_ids
    rows = list(ConstantLengthDataset(tokenizer, ROWS, dataset_text_field="text", seq_length=4, shuffle=False))
    words = ["a b c </s>", "d </s> e f", "a b </s> hi"]  # "yes </s>" does not fill a row
    assert [row["input_ids"].tolist() for row in rows] == [ids(line.split()) for line in words]
    for row in rows:
        assert row["input_ids"].dtype == torch.int64
        assert torch.equal(row["labels"], row["input_ids"])


def test_without_end_tokens_and_with_a_formatting_function(tokenizer):
    rows = ConstantLengthDataset(
        tokenizer,
        ROWS,
        formatting_func=lambda row: f"no {row['text']}",
        seq_length=2,
        shuffle=False,
        append_concat_token=False,
    )
    words = ["no", "a", "b", "c", "no", "d", "no", "e", "f", "a", "b", "no", "hi", "yes"]
    assert flat(rows) == tokenizer.convert_tokens_to_ids(words)


def test_infinite_begins_again(tokenizer):
    rows = ConstantLengthDataset(
        tokenizer, ROWS, "text", infinite=True, seq_length=7, num_of_sequences=1, chars_per_token=2.0
    )
    with pytest.warns(UserWarning, match="begin again"):
        assert len(list(itertools.islice(rows, 12))) == 12


def test_wrong_arguments(tokenizer):
    with pytest.raises(ValueError, match="expected exactly one of them"):
        ConstantLengthDataset(tokenizer, ROWS)
    with pytest.raises(ValueError, match="seq_length must be >= 1, got 0"):
        ConstantLengthDataset(tokenizer, ROWS, "text", seq_length=0)
    with pytest.raises(TypeError, match="the text of a row is a list"):
        list(ConstantLengthDataset(tokenizer, ROWS, formatting_func=lambda row: [row["text"]]))
    with pytest.raises(ValueError, match="no rows, expected at least 1"):
        list(ConstantLengthDataset(tokenizer, ROWS.select([]), "text", infinite=True))
