import pytest
from datasets import Dataset
from tests.words import CHAT_TEMPLATE, word_tokenizer

from trl.legacy.text_data import (
    get_formatting_func_from_dataset,
    instructions_formatting_function,
)

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TEXT = "<user> hi </s> <assistant> yes </s> "


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_conversations(tokenizer, name: str):
    format_row = get_formatting_func_from_dataset(Dataset.from_dict({name: [HELLO]}), tokenizer)
    assert format_row({name: HELLO}) == TEXT
    assert format_row({name: [HELLO, HELLO]}) == [TEXT, TEXT]


def test_instructions(tokenizer):
    format_row = get_formatting_func_from_dataset(
        Dataset.from_dict({"prompt": ["hi"], "completion": ["yes"]}), tokenizer
    )
    assert format_row({"prompt": "hi", "completion": "yes"}) == TEXT
    assert format_row({"prompt": ["hi"], "completion": ["yes"]}) == [TEXT]
    assert instructions_formatting_function(tokenizer)({"prompt": "hi", "completion": "yes"}) == TEXT


@pytest.mark.parametrize(
    "columns",
    [{"text": ["x"]}, {"messages": ["x"]}, {"messages": [[{"from": "a", "value": "b"}]]}, {"prompt": ["x"]}],
)
def test_other_columns_have_no_function(tokenizer, columns):
    assert get_formatting_func_from_dataset(Dataset.from_dict(columns), tokenizer) is None


def test_the_known_import_path():
    from trl.extras import dataset_formatting

    assert dataset_formatting.get_formatting_func_from_dataset is get_formatting_func_from_dataset
