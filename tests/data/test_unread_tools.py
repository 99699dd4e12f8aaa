"""Tools that a chat template does not show are reported once by every kind of preparation."""

import json
import logging

import pytest
from datasets import Dataset, IterableDataset
from tests.models.words import word_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation
from trl.data.prompts import PromptPreparation, PromptSets
from trl.data.text import SFTPreparation
from trl.data.unpaired import UnpairedPreparation

SPOKEN = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
SHOWING = "{% if tools %}{{ 'tools ' }}{% endif %}" + SPOKEN
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HAVE = (json.dumps([TOOL]), "[]", None, json.dumps([TOOL]))  # two of four


def tokenizer(template=SPOKEN):
    found = word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    found.chat_template = template
    return found


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


def with_tools(**columns):
    return Dataset.from_list([{**columns, "tools": own} for own in HAVE])


ASKED = said("the cat", "user")
PAIRS = {"prompt": ASKED, "chosen": said("sat"), "rejected": said("on the mat")}
KINDS = {
    "sft": (
        {"messages": ASKED + said("sat")},
        lambda rows, words: prepare_dataset(rows, words, SFTPreparation(max_length=None)),
    ),
    "pairs": (PAIRS, lambda rows, words: prepare_dataset(rows, words, PreferencePreparation())),
    "reward": (PAIRS, lambda rows, words: prepare_dataset(rows, words, RewardPreparation())),
    "unpaired": (
        {"prompt": ASKED, "completion": said("sat"), "label": True},
        lambda rows, words: prepare_dataset(rows, words, UnpairedPreparation()),
    ),
    "prompts": (
        {"prompt": ASKED},
        lambda rows, words: PromptSets(words, PromptPreparation(), context_length=None, room=("", None))(rows, "train"),
    ),
}


def warnings_of(caplog, prepare, rows, template=SPOKEN):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        prepare(rows, tokenizer(template))
    return [record.getMessage() for record in caplog.records if "tools" in record.getMessage()]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_tools_the_template_leaves_out(kind, caplog):
    columns, prepare = KINDS[kind]
    (warning,) = warnings_of(caplog, prepare, with_tools(**columns))
    assert "train dataset: the prompts do not show the rows' tools" in warning
    assert "the chat template reads none" in warning
    assert not warnings_of(caplog, prepare, with_tools(**columns), SHOWING)
    assert not warnings_of(caplog, prepare, with_tools(**columns).remove_columns("tools"))
    named = {"default": SPOKEN, "tool_use": SHOWING}
    assert not warnings_of(caplog, prepare, with_tools(**columns), named)


def test_tools_given_for_all_rows(caplog):
    def prepare(rows, words):
        return prepare_dataset(rows, words, PreferencePreparation(tools=[TOOL]))

    rows = Dataset.from_list([PAIRS] * 2)
    (warning,) = warnings_of(caplog, prepare, rows)
    assert "because the chat template reads none" in warning
    assert not warnings_of(caplog, prepare, rows, SHOWING)
    text = Dataset.from_list([{"prompt": "the cat", "chosen": " sat", "rejected": " on"}])
    (warning,) = warnings_of(caplog, prepare, text, SHOWING)
    assert "only conversations are rendered with tools" in warning


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_the_template_leaves_out(kind, caplog):
    columns, prepare = KINDS[kind]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    name = next(name for name in ("messages", "prompt", "chosen") if isinstance(columns.get(name), list))
    called = {**columns, name: [columns[name][0], call, {"role": "tool", "content": "up"}, *columns[name]]}

    def warned(row, template):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare(Dataset.from_list([columns, row]), tokenizer(template))
        return "train dataset: the messages' tool calls are not shown" in caplog.text

    assert warned(called, SPOKEN) and not warned(called, SPOKEN + "{# tool_calls #}") and not warned(columns, SPOKEN)


def test_a_stream_is_judged_by_its_first_row(caplog):
    columns, prepare = KINDS["sft"]
    stream = IterableDataset.from_generator(lambda: iter(with_tools(**columns)))
    (warning,) = warnings_of(caplog, prepare, stream)
    assert "train dataset: the prompts do not show" in warning
